"""The one path from request to answer; every door uses it.

Every front-end is token-wise: a token's vector depends on its id, its position and its segment alone. So rows of
unequal length, masks and explicit positions all run as T rows of length 1 whose offset is the position: no padding.

Letters: B batch, L length, T tokens of all rows, D output width.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from incipit.service.batching import Scheduler
from incipit.service.errors import Invalid
from incipit.service.messages import DTYPES, Answer, Int64, Request
from incipit.service.metrics import Metrics
from incipit.service.repository import Model, Repository
from incipit.service.validation import check


@dataclass(frozen=True)
class Call:
    """The inputs of one run of a graph, and the offset (B,) that continues each row."""

    feeds: dict[str, Int64]
    next_offset: Int64


class Engine:
    """Answers requests.

    Args:
        repository: the models.
        scheduler: runs what takes long.
        metrics: counts.
        max_tokens: most tokens of one request.

    """

    def __init__(self, repository: Repository, scheduler: Scheduler, metrics: Metrics, max_tokens: int) -> None:
        self.repository = repository
        self.scheduler = scheduler
        self.metrics = metrics
        self.max_tokens = max_tokens
        self.ready = False

    async def embed(self, model: Model, request: Request) -> Answer:
        """Return the vectors of `request`.

        Raises:
            ClientFault: the request is not allowed.
            Unavailable: too much work waits.

        """
        check(request, model.manifest, self.max_tokens)
        call = plan(request, has_segments=model.manifest.segments > 0)
        width, rows = model.manifest.width, request.input_ids
        tokens = len(rows.values)
        vectors = await self.scheduler.run(
            tokens * width, lambda: cast(model.session.run(call.feeds).reshape(tokens, width), request.dtype)
        )
        self.metrics.tokens(model.name, tokens)
        return Answer(
            model=model.name,
            version=model.version,
            dtype=request.dtype,
            embeddings=vectors,
            lengths=rows.lengths,
            shape=(tokens, width) if rows.length is None else (len(rows.lengths), rows.length, width),
            next_offset=call.next_offset,
        )

    def warm_up(self) -> None:
        """Run each model once; the engine is ready afterwards."""
        for model in self.repository.all():
            model.session.run(
                {tensor.name: np.zeros((1,) * len(tensor.shape), np.int64) for tensor in model.manifest.inputs}
            )
        self.ready = True


def plan(request: Request, has_segments: bool) -> Call:
    """Choose the shape of the call for a request that was checked, and count positions.

    A padding token, where the mask is 0, stands at position 0, as in transformers' `generate()`.
    """
    rows, mask = request.input_ids, request.attention_mask
    offset = np.zeros(1, np.int64) if request.offset is None else request.offset
    next_offset: Int64 = np.broadcast_to(offset, rows.lengths.shape) + request.real_tokens
    segments = request.token_type_ids
    if mask is not None and mask.values.all():
        mask = None
    if request.position_ids is None and mask is None and rows.length is not None:
        shape, positions = (len(rows.lengths), rows.length), offset
    else:
        shape = (len(rows.values), 1)
        if request.position_ids is not None:
            positions = request.position_ids.values
            real = positions + 1 if mask is None else (positions + 1) * mask.values
            next_offset = np.maximum.reduceat(real, rows.starts)
        elif mask is not None:
            before = np.cumsum(mask.values) - mask.values
            positions = (rows.spread(offset) + before - rows.spread(before[rows.starts])) * mask.values
        else:
            positions = rows.spread(offset) + np.arange(shape[0]) - rows.spread(rows.starts)
    feeds = {"input_ids": rows.values.reshape(shape), "offset": positions}
    if has_segments:
        values = np.zeros(len(rows.values), np.int64) if segments is None else segments.values
        feeds["token_type_ids"] = values.reshape(shape)
    return Call(feeds, next_offset)


def cast(vectors: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return `vectors` in an output type, rounded to nearest, ties to even.

    Raises:
        Invalid: a value is too large for the type.

    """
    if dtype == "float32":
        return vectors
    with np.errstate(over="ignore"):
        narrow = vectors.astype(DTYPES[dtype])
    if not np.isfinite(narrow).all() and np.isfinite(vectors).all():
        raise Invalid("dtype", dtype, f"float32, since a value of {float(np.abs(vectors).max()):g} does not fit")
    return narrow
