"""The state of all clients: expected vectors, counters, and the end of the test."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import onnx
from numpy.typing import NDArray
from websockets import ConnectionClosed, WebSocketException

from preblock.client.errors import NoAnswer

T = TypeVar("T")
Vectors = NDArray[np.float32]
Rows = list[list[int]]
PATIENCE = 60.0
"""Timeout of an answer in seconds."""


class SoakFailure(Exception):
    """The server gave a wrong answer."""


class Broken(Exception):
    """The connection broke."""


BROKEN = (Broken, OSError, EOFError, WebSocketException, NoAnswer, httpx.TransportError)


def expect(right: Any, what: str, got: object) -> None:
    """Check a condition.

    Raises:
        SoakFailure: `right` is false.

    """
    if not right:
        raise SoakFailure(f"{what}: {got}")


class Truth:
    """The expected vectors of an artifact of tokens and learned positions.

    Args:
        folder: folder of the artifact.

    """

    def __init__(self, folder: Path) -> None:
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        tables = [tensor for tensor in graph.initializer if tensor.external_data]
        names = {tensor.name: self._table(folder, tensor) for tensor in tables}
        self.tokens, self.positions = (names[f"{table}.weight"] for table in ("tokens", "positions"))
        if len(names) > 2 or {table.dtype.name for table in names.values()} != {"float32"}:
            raise SystemExit(f"{folder}: got the tables {', '.join(names)}, expected tokens and positions in float32")

    @staticmethod
    def _table(folder: Path, tensor: Any) -> Vectors:
        place = {entry.key: entry.value for entry in tensor.external_data}
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(folder / place["location"], kind, "r", int(place["offset"]), tuple(tensor.dims))

    def vectors(self, ids: Rows, positions: Rows) -> Vectors:
        """Return the vectors (T, D) of rows of ids at rows of position indices."""
        return self.lookups(ids) + self.positions[flat(positions)]

    def lookups(self, ids: Rows) -> Vectors:
        """Return the token embeddings of rows of ids, (T, D)."""
        return np.asarray(self.tokens[flat(ids)])


def flat(rows: Rows) -> NDArray[np.int64]:
    """Return the values of all rows, int64 (T,)."""
    return np.array([value for row in rows for value in row], np.int64)


class Soak:
    """The state shared by all clients.

    Args:
        truth: expected vectors of the model.
        model: name of the model.
        steps: number of answers at the end of the test.
        seconds: duration, in place of `steps`; 0 for no limit.

    """

    def __init__(self, truth: Truth, model: str, steps: int = 0, seconds: float = 0.0) -> None:
        self.truth, self.model = truth, model
        self._steps, self._seconds, self._begin = steps, seconds, time.monotonic()
        self.limit, self.vocabulary = len(truth.positions), len(truth.tokens)
        self.right, self.refused, self.broken = Counter[str](), Counter[str](), Counter[str]()
        self.counts = Counter[str]()
        self.large = asyncio.Lock()
        self.sequences = count(1)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def done(self) -> float:
        """Completed fraction of the test; 1 at the end."""
        return self.seconds / self._seconds if self._seconds else self.right.total() / self._steps

    async def attempt(self, protocol: str, action: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of an action; None if the connection broke.

        Raises:
            SoakFailure: the action timed out, or the server closed the connection.

        """
        try:
            async with asyncio.timeout(PATIENCE):
                return await action()
        except TimeoutError:
            raise SoakFailure(f"{protocol} hangs") from None
        except BROKEN as error:
            if isinstance(error, ConnectionClosed) and error.rcvd is not None:
                raise SoakFailure(f"the server closed the stream: {error}") from error
            self.broken[protocol] += 1
            return None
