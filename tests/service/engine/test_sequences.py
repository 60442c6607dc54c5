"""Sequences: their offsets, failures, limits and ends. Oracle: requests without a sequence."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.service.core.errors import Conflict, Invalid, PreblockError, TooLarge, Unavailable
from preblock.service.core.types import SequenceRef, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository
from tests.support.engines import ask_engine, open_engine
from tests.support.event_loops import WaitedTimeLoop


@pytest.fixture(scope="module")
def sequence_repository(tiny_repository: Path) -> Repository:
    return Repository(tiny_repository)


@pytest.fixture
def sequence_engine(sequence_repository: Repository) -> Iterator[Engine]:
    with open_engine(sequence_repository, max_request_tokens=64) as engine:
        yield engine


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


Test = Callable[[Sequences, SequenceStore, TokenModel], Awaitable[None]]


def run(engine: Engine, test: Test, **changes: Any) -> None:
    """Run a test with the sequence store of a stream, `gpt` and other settings; at its end the store is empty."""
    limits = {"max_sequence_rows": 8, "max_stream_sequence_rows": 4} | changes
    engine.settings.use(engine.settings.current.model_copy(update=limits))

    async def main() -> None:
        sequences = Sequences(engine)
        with sequences.stream() as room:
            await test(sequences, room, engine.repository.get("gpt"))
        sequences.shared_store.clear()
        assert (sequences.rows, open_now(engine)) == (0, 0)

    with asyncio.Runner(loop_factory=WaitedTimeLoop) as runner:
        runner.run(main())


def test_sequence_start_resets_the_offset(sequence_engine: Engine) -> None:
    async def test(_: Sequences, room: SequenceStore, model: TokenModel) -> None:
        for offset, rows in ((3, 1), (4, 2), (0, 1), ([1, 2], 2)):
            ids = [[1]] * rows
            found = await ask(room, model, ids, SequenceRef("x", start=True), offset)
            assert found == await stateless(sequence_engine, model, ids, offset)
            assert where(room) == {("gpt", 1, "x"): (np.zeros(rows, int) + np.array(offset) + 1).tolist()}
        await ask(room, model, [[1]], SequenceRef("y", start=True, end=True))
        assert len(where(room)) == 1

    run(sequence_engine, test)


def test_sequence_ids_are_separate_per_model_version(sequence_engine: Engine) -> None:
    models = [sequence_engine.repository.get(*of) for of in (("bert", "1"), ("bert", "2"), ("gpt",))]

    async def test(_: Sequences, room: SequenceStore, __: TokenModel) -> None:
        for length, model in enumerate(models, 1):
            await ask(room, model, [1] * length, SequenceRef(5, start=True))
        assert where(room) == {("bert", 1, 5): [1], ("bert", 2, 5): [2], ("gpt", 1, 5): [3]}

    run(sequence_engine, test, max_stream_sequence_rows=6)


def test_padding_and_positions_advance_sequence_rows(sequence_engine: Engine) -> None:
    mask, positions = (TokenRows.of_array(np.array(values)) for values in ([[0, 1], [1, 1]], [[3, 4], [0, 1]]))

    async def test(_: Sequences, room: SequenceStore, model: TokenModel) -> None:
        await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5, start=True), attention_mask=mask)
        assert where(room)["gpt", 1, 5] == [1, 2]
        found = await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5), [1, 2], position_ids=positions)
        assert found == await stateless(sequence_engine, model, [[1, 2], [3, 4]], None, position_ids=positions)
        assert where(room)["gpt", 1, 5] == [5, 2]

    run(sequence_engine, test)


REFUSED: list[tuple[Any, SequenceRef, Any, type[PreblockError], str]] = [
    ([1], SequenceRef("5"), None, Invalid, "parameters.sequence_id '5' does not run on gpt version 1"),
    ([1], SequenceRef(5), [4, 4], Invalid, "offset: got 2 values"),
    ([7], SequenceRef(5, end=True), None, Invalid, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([7], SequenceRef(5, start=True), None, Invalid, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([1], SequenceRef(5, start=True), 7, Invalid, "offset: got 7, expected 0 to 6"),
    ([1], SequenceRef(5, start=True), [0, 0], Invalid, "offset: got 2 values"),
    ([[1]] * 5, SequenceRef(5, start=True), None, Unavailable, "input_ids: 4 rows beside 1 that run exceed"),
    ([[1]] * 9, SequenceRef(6, start=True), None, TooLarge, "input_ids: 9 rows beside 1 that run exceed"),
]


@pytest.mark.parametrize(("ids", "turn", "offset", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_sequence_request_changes_nothing(
    sequence_engine: Engine, ids: Any, turn: SequenceRef, offset: Any, kind: type[PreblockError], message: str
) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        await ask(room, model, [1, 2, 3, 4], SequenceRef(5, start=True))
        with pytest.raises(kind, match="^" + re.escape(message)):
            await ask(room, model, ids, turn, offset)
        assert (where(room), sequences.rows, open_now(sequence_engine)) == ({("gpt", 1, 5): [4]}, 1, 1)

    run(sequence_engine, test)


def test_failed_response_does_not_advance_sequence(sequence_engine: Engine) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        await ask(room, model, [1], SequenceRef(5, start=True))

        async def fail(turn: SequenceRef) -> None:
            async with room.answer(model, request([1], turn), RequestRecord("grpc")):
                raise TooLarge("outputs", "a test", "less")

        for turn in (SequenceRef(5), SequenceRef(5, end=True), SequenceRef(5, start=True), SequenceRef(6, start=True)):
            with pytest.raises(TooLarge):
                await fail(turn)
        assert (where(room), sequences.rows, open_now(sequence_engine)) == ({("gpt", 1, 5): [1]}, 1, 1)

    run(sequence_engine, test)


def test_concurrent_request_to_sequence_is_a_conflict(sequence_engine: Engine) -> None:
    async def test(_: Sequences, room: SequenceStore, model: TokenModel) -> None:
        async with room.answer(model, request([1], SequenceRef(5, start=True)), RequestRecord("grpc")):
            for turn in (SequenceRef(5), SequenceRef(5, start=True)):
                with pytest.raises(Conflict, match=r"parameters\.sequence_id 5 has a request in progress"):
                    await ask(room, model, [1], turn)
            await ask(room, model, [1], SequenceRef(6, start=True))
        assert where(room) == {("gpt", 1, 6): [1], ("gpt", 1, 5): [1]}

    run(sequence_engine, test)


def test_sequence_rows_are_limited_per_stream_and_process(sequence_engine: Engine) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        for id_ in range(1, 5):
            await ask(room, model, [1], SequenceRef(id_, start=True))
        with pytest.raises(Unavailable, match="1 rows beside 4 that run exceed the limit of 4 rows of sequences"):
            await ask(room, model, [1], SequenceRef(5, start=True))
        with sequences.stream() as other:
            await ask(other, model, [[1]] * 4, SequenceRef(1, start=True))
            with pytest.raises(Unavailable, match="1 rows beside 8 that run exceed the limit of 8 rows of sequences"):
                await ask(sequences.shared_store, model, [1], SequenceRef(5, start=True))
        await ask(sequences.shared_store, model, [1], SequenceRef(5, start=True))
        await ask(room, model, [1], SequenceRef(4, end=True))
        await ask(room, model, [1], SequenceRef(5, start=True))
        assert (sequences.rows, open_now(sequence_engine)) == (5, 5)

    run(sequence_engine, test)


def test_only_the_idle_sequence_times_out(sequence_engine: Engine) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        await ask(room, model, [1], SequenceRef(5, start=True))
        await ask(room, model, [[1], [2]], SequenceRef(6, start=True))
        async with room.answer(
            model, request([1], SequenceRef(7, start=True)), RequestRecord("grpc")
        ):  # takes longer than it may wait
            for _ in range(3):
                await asyncio.sleep(100)
                await ask(room, model, [1], SequenceRef(5))
        assert where(room) == {("gpt", 1, 5): [4], ("gpt", 1, 7): [1]}
        with pytest.raises(Invalid, match="sequence_id 6 does not run"):
            await ask(room, model, [[1], [2]], SequenceRef(6))
        await asyncio.sleep(199)
        assert where(room) == {("gpt", 1, 5): [4], ("gpt", 1, 7): [1]}
        await asyncio.sleep(2)
        assert (sequences.rows, open_now(sequence_engine)) == (0, 0)
        await ask(room, model, [1], SequenceRef(5, start=True))  # and the room can be used again

    run(sequence_engine, test, sequence_idle_timeout_seconds=200)


def test_shorter_timeout_ends_sequences_of_before(sequence_engine: Engine) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        await ask(room, model, [1], SequenceRef(5, start=True))
        settings = sequences.settings
        settings.use(settings.current.model_copy(update={"sequence_idle_timeout_seconds": 2}))
        await ask(room, model, [1], SequenceRef(6, start=True))
        await asyncio.sleep(4)
        assert where(room) == {}

    run(sequence_engine, test, sequence_idle_timeout_seconds=600)


def test_cancelled_request_leaves_no_sequence(sequence_engine: Engine) -> None:
    async def test(sequences: Sequences, room: SequenceStore, model: TokenModel) -> None:
        async def never() -> None:
            async with room.answer(model, request([1], SequenceRef(5, start=True)), RequestRecord("grpc")):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(never())
        await asyncio.sleep(0)
        assert sequences.rows == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (where(room), sequences.rows, open_now(sequence_engine)) == ({}, 0, 0)

    run(sequence_engine, test)
