"""A decode stream: the running offset of one sequence, kept by the connection that it belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from incipit.service.engine import Engine
from incipit.service.errors import IncipitError, Invalid
from incipit.service.messages import DTYPES, Request, Rows, TokenAnswer
from incipit.service.repository import Model


class DecodeStream:
    """One sequence that is fed step by step.

    Args:
        engine: answers the steps.
        model: stays the same for the whole stream.
        offset: tokens already fed before the stream opened; it may be max_len, where nothing fits any more.
        dtype: a key of DTYPES.

    Raises:
        Invalid: the offset or the type is not allowed.

    """

    def __init__(self, engine: Engine, model: Model, offset: int = 0, dtype: str = "float32") -> None:
        if not 0 <= offset <= model.manifest.limit:
            raise Invalid("offset", offset, f"0 to {model.manifest.limit}")
        if dtype not in DTYPES:
            raise Invalid("dtype", dtype, ", ".join(DTYPES))
        self.offset = offset
        self.model = model
        self._engine = engine
        self._dtype = dtype

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Put the offset back where the block fails: a step whose answer cannot be given has not been made."""
        before = self.offset
        try:
            yield
        except IncipitError:
            self.offset = before
            raise

    async def step(self, input_ids: Rows, token_type_ids: Rows | None = None) -> TokenAnswer:
        """Return the vectors of the next tokens, one row of them, and advance the offset.

        Raises:
            ClientFault: the step is not allowed; it changed nothing.

        """
        if len(input_ids.lengths) != 1:
            raise Invalid("input_ids", f"{len(input_ids.lengths)} rows", "one row: a stream is one sequence")
        request = Request(
            input_ids=input_ids,
            offset=np.array([self.offset]),
            indices={} if token_type_ids is None else {"token_type_ids": token_type_ids},
            dtype=self._dtype,
        )
        answer = await self._engine.embed(self.model, request)
        self.offset = int(answer.next_offset[0])
        return answer
