"""Requests for the tables of a model: rows of positions, and the nearest tokens of a token.

Letters: V vocabulary, P width of a row of positions, D width of a token row.
"""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.names import POSITION_EMBEDDINGS
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64, Result
from preblock.service.engine.engine import Engine
from preblock.service.engine.plain_calls import check_size
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import TokenModel

MAX_POSITIONS = 4096
DEFAULT_POSITIONS = 64
MAX_NEIGHBOURS = 100
DEFAULT_NEIGHBOURS = 10
BLOCK_VALUES = 2**20
"""Values of the token rows in memory at a time."""

ResultT = TypeVar("ResultT")
Nearest = tuple[Int64, NDArray[np.float32]]
"""Ids of tokens and their cosines, the nearest first."""


class TableReader:
    """Answers requests for the tables of models.

    Args:
        engine: runs the work, and has the limits.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def positions(self, model: TokenModel, first: int, count: int | None, record: RequestRecord) -> Result:
        """Return the vectors that the model adds for `count` positions from `first` on, float32 (count, P).

        Args:
            model: with the positions.
            first: position of the first row.
            count: number of rows; None for `DEFAULT_POSITIONS`, or fewer up to the end of the table.
            record: of the request.

        Raises:
            Invalid: the model adds no position vectors, or a number is not allowed.
            TooLarge: the rows exceed the limit of a buffered response.
            Unavailable: the work queue is full.

        """
        record.select(model.name, model.version)
        rows = model.position_rows
        if rows is None:
            message = f"{model.name} adds no position vectors"
            raise Invalid("positions", "a request for them", "none", message=message)
        limit = model.manifest.limit
        if not 0 <= first < limit:
            raise Invalid("first", first, f"0 to {limit - 1}")
        most = min(MAX_POSITIONS, limit - first)
        number = _check_count(count, most, min(DEFAULT_POSITIONS, most))
        size = number * rows.width
        check_size(self._engine.settings.requests, "count", values=size)
        await self._engine.admission.reserve_response(record, size)
        found = await self._run(size, lambda: rows.compute(first, number), record)
        tensors = {POSITION_EMBEDDINGS: found}
        return Result(model=model.name, version=model.version, dtype="float32", tensors=tensors)

    async def neighbours(self, model: TokenModel, id_: int, count: int | None, record: RequestRecord) -> Nearest:
        """Return the `count` tokens with the highest cosine to the token `id_`, without itself.

        Args:
            model: with the tokens; its own lookup is compared, before scale, positions and norm.
            id_: of the token.
            count: number of tokens; None for `DEFAULT_NEIGHBOURS`, or all others of a smaller vocabulary.
            record: of the request.

        Raises:
            Invalid: the lookup of the model is unknown, or a number is not allowed.
            Unavailable: the work queue is full.

        """
        record.select(model.name, model.version)
        lookup, vocab_size = model.manifest.token_embeddings, model.manifest.vocab_size
        if lookup is None:
            message = f"the token rows of {model.name} are unknown, because its module has no lookup of its own"
            raise Invalid("neighbours", "a request for them", "none", message=message)
        if not 0 <= id_ < vocab_size:
            raise Invalid("id", id_, f"0 to {vocab_size - 1}")
        most = min(MAX_NEIGHBOURS, vocab_size - 1)
        number = _check_count(count, most, min(DEFAULT_NEIGHBOURS, most))
        return await self._run(vocab_size * lookup.width, lambda: find_nearest(model, id_, number), record)

    async def spell(self, model: TokenModel, ids: Int64, record: RequestRecord) -> list[str | None]:
        """Return the token of each id in the vocabulary of the model's tokenizer; None without one.

        Raises:
            ArtifactError: the file of the tokenizer is broken.
            Unavailable: the work queue is full.

        """
        tokenizer = model.tokenizer
        if tokenizer is None:
            return [None] * len(ids)
        # Opening the tokenizer takes longer than the event loop may wait.
        size = 0 if tokenizer.opened else BLOCK_VALUES
        return await self._run(size, lambda: tokenizer.spell(ids.tolist()), record)

    async def _run(self, size: int, work: Callable[[], ResultT], record: RequestRecord) -> ResultT:
        """Run `work`, of a cost of `size` values, and time it in `record`."""
        record.rows = record.batch = 1
        record.checked = perf_counter()

        def run() -> ResultT:
            record.dequeued = perf_counter()
            found = work()
            record.ran = perf_counter()
            return found

        return await self._engine.scheduler.run(size, run)


def find_nearest(model: TokenModel, id_: int, count: int) -> Nearest:
    """Return the `count` tokens with the highest cosine to the token `id_`, without itself; equal ones by id.

    The rows are read block by block: the memory is `BLOCK_VALUES` values and one for each token. A row of zeros has
    cosine 0.
    """
    assert model.manifest.token_embeddings is not None
    vocab_size = model.manifest.vocab_size
    block = max(1, BLOCK_VALUES // model.manifest.token_embeddings.width)
    (target,) = model.look_up(np.array([id_]))
    cosines = np.empty(vocab_size, np.float32)
    for begin in range(0, vocab_size, block):
        rows = model.look_up(np.arange(begin, min(begin + block, vocab_size)))
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(target)
        cosines[begin : begin + block] = rows @ target / np.where(norms == 0, 1, norms)
    others = np.delete(np.arange(vocab_size), id_)
    order = np.argsort(-cosines[others], kind="stable")[:count]
    ids = others[order]
    return ids, cosines[ids]


def _check_count(count: int | None, most: int, default: int) -> int:
    """Return the number of rows; raise Invalid unless it is 1 to `most`."""
    if count is None:
        return default
    if not 1 <= count <= most:
        raise Invalid("count", count, f"1 to {most}")
    return count
