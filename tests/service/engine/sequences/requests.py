"""Requests of sequences, and the same vectors without a sequence."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from preblock.service.core.types import SequenceRef, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import TokenModel
from tests.support.engines import ask_engine

IDS = [1, 2, 3, 4, 5, 6]


def open_now(engine: Engine) -> int:
    """Return the gauge of open sequences."""
    text = engine.metrics.expose()[0].decode()
    return int(float(text.partition("\npreblock_sequences_open ")[2].partition("\n")[0]))


def request(ids: Any, turn: SequenceRef | None = None, offset: Any = None, **more: Any) -> TokenRequest:
    rows = np.atleast_2d(np.array(ids, np.int64))
    stated = None if offset is None else np.atleast_1d(np.array(offset, np.int64))
    return TokenRequest(input_ids=TokenRows.of_array(rows), offset=stated, sequence=turn, **more)


async def ask(
    room: SequenceStore, model: TokenModel, ids: Any, turn: SequenceRef, offset: Any = None, **more: Any
) -> bytes:
    async with room.answer(model, request(ids, turn, offset, **more), RequestRecord("grpc")) as answer:
        return answer.arrays["embeddings"].tobytes()


async def stateless(engine: Engine, model: TokenModel, ids: Any, offset: Any, **more: Any) -> bytes:
    answer = await ask_engine(engine, model, request(ids, None, offset, **more))
    return answer.arrays["embeddings"].tobytes()


def where(room: SequenceStore) -> dict[Any, list[int]]:
    return {(key.model, key.version, key.id): running.offset.tolist() for key, running in room.running().items()}


class _Selector(selectors.DefaultSelector):
    """Ends each wait at once, and counts its time."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and 0)
        self.waited += 0 if found else timeout or 0
        return found


class WaitedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it waits for a timer: a busy machine changes nothing."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.waited


def run(engine: Engine, test: Callable[[Sequences, SequenceStore], Awaitable[None]], **changes: Any) -> None:
    """Run a test with the sequence store of a stream and other settings; at its end the store is empty."""
    limits = {"max_sequence_rows": 8, "max_stream_sequence_rows": 4} | changes
    engine.settings.use(engine.settings.current.model_copy(update=limits))

    async def main() -> None:
        sequences = Sequences(engine)
        with sequences.stream() as room:
            await test(sequences, room)
        sequences.shared_store.clear()
        assert (sequences.rows, open_now(engine)) == (0, 0)

    with asyncio.Runner(loop_factory=WaitedTimeLoop) as runner:
        runner.run(main())
