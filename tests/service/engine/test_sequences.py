"""Running sequences without their protocol. Oracle: requests with an offset of their own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.service.core.errors import Conflict, Invalid, PreblockError, TooLarge, Unavailable
from preblock.service.core.types import PairwiseBiasRequest, SequenceRef, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.observability.record import RequestRecord
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from tests.support.engines import ask_engine, open_engine

IDS = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def repository(tiny_repository: Path) -> Repository:
    return Repository(tiny_repository, CPU, 1)


@pytest.fixture
def engine(repository: Repository) -> Iterator[Engine]:
    with open_engine(repository, max_request_tokens=64) as engine:
        yield engine


def open_now(engine: Engine) -> int:
    """Return the gauge of open sequences."""
    text = engine.metrics.expose("")[0].decode()
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


def run(engine: Engine, test: Callable[[Sequences, SequenceStore], Awaitable[None]], **changes: Any) -> None:
    """Run a test with the sequence store of a stream and other settings; at its end the store is empty."""
    limits = {"max_sequence_rows": 8, "max_stream_sequence_rows": 4} | changes
    engine.settings.current = engine.settings.current.model_copy(update=limits)

    async def main() -> None:
        sequences = Sequences(engine)
        with sequences.stream() as room:
            await test(sequences, room)
        sequences.shared_store.clear()
        assert (sequences.rows, open_now(engine)) == (0, 0)

    asyncio.run(main())


def test_sequence_request_continues_at_last_offset(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        assert await ask(room, model, IDS[:2], SequenceRef(5, start=True)) == await stateless(engine, model, IDS[:2], 0)
        assert where(room) == {("gpt", 1, 5): [2]}
        assert await ask(room, model, IDS[2:3], SequenceRef(5)) == await stateless(engine, model, IDS[2:3], 2)
        assert await ask(room, model, IDS[3:5], SequenceRef(5), 3) == await stateless(engine, model, IDS[3:5], 3)
        assert (where(room), open_now(engine)) == ({("gpt", 1, 5): [5]}, 1)
        assert await ask(room, model, IDS[5:], SequenceRef(5, end=True)) == await stateless(engine, model, IDS[5:], 5)
        assert (where(room), open_now(engine)) == ({}, 0)

    run(engine, test)


def test_sequence_start_resets_the_offset(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        for offset, rows in ((3, 1), (4, 2), (0, 1), ([1, 2], 2)):
            ids = [[1]] * rows
            found = await ask(room, model, ids, SequenceRef("x", start=True), offset)
            assert found == await stateless(engine, model, ids, offset)
            assert where(room) == {("gpt", 1, "x"): (np.zeros(rows, int) + np.array(offset) + 1).tolist()}
        assert await ask(room, model, [[1]], SequenceRef("y", start=True, end=True)) == await stateless(
            engine, model, [1], 0
        )
        assert len(where(room)) == 1

    run(engine, test)


def test_sequence_ids_are_separate_per_model_version(engine: Engine) -> None:
    models = [engine.repository.get("bert", "1"), engine.repository.get("bert", "2"), engine.repository.get("gpt")]

    async def test(_: Sequences, room: SequenceStore) -> None:
        for length, model in enumerate(models, 1):
            await ask(room, model, IDS[:length], SequenceRef(5, start=True))
        with pytest.raises(Invalid):
            await ask(room, models[0], [1], SequenceRef("5"))
        assert where(room) == {("bert", 1, 5): [1], ("bert", 2, 5): [2], ("gpt", 1, 5): [3]}
        for length, model in enumerate(models, 1):
            assert await ask(room, model, [1], SequenceRef(5)) == await stateless(engine, model, [1], length)

    run(engine, test, max_stream_sequence_rows=6)


def test_padding_and_positions_advance_sequence_rows(engine: Engine) -> None:
    model = engine.repository.get("gpt")
    mask, positions = (TokenRows.of_array(np.array(values)) for values in ([[0, 1], [1, 1]], [[3, 4], [0, 1]]))

    async def test(_: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5, start=True), attention_mask=mask)
        assert where(room)["gpt", 1, 5] == [1, 2]
        found = await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5), [1, 2], position_ids=positions)
        assert found == await stateless(engine, model, [[1, 2], [3, 4]], None, position_ids=positions)
        assert where(room)["gpt", 1, 5] == [5, 2]

    run(engine, test)


REFUSED: list[tuple[Any, SequenceRef, Any, type[PreblockError], str]] = [
    (
        [1],
        SequenceRef(6),
        None,
        Invalid,
        r"parameters.sequence_id 6 does not run on gpt version 1; ",
    ),
    (
        [1],
        SequenceRef("5"),
        None,
        Invalid,
        r"parameters.sequence_id '5' does not run on gpt version 1",
    ),
    ([[1], [2]], SequenceRef(5), None, Invalid, r"input_ids: got 2 rows, expected one row, as are running"),
    ([1], SequenceRef(5), 3, Conflict, r"offset\[0\]: got 3, expected 4, the offset of this row"),
    ([1], SequenceRef(5, end=True), 5, Conflict, r"offset\[0\]: got 5, expected 4, the offset of this row"),
    ([1], SequenceRef(5), [4, 4], Invalid, r"offset: got 2 values, expected one value, or one for each of 1 rows"),
    ([7], SequenceRef(5), None, Invalid, r"input_ids\[0\]\[0\]: got 7, expected 0 to 6"),
    ([7], SequenceRef(5, start=True), None, Invalid, r"input_ids\[0\]\[0\]: got 7, expected 0 to 6"),
    ([7], SequenceRef(5, end=True), None, Invalid, r"input_ids\[0\]\[0\]: got 7, expected 0 to 6"),
    (
        [1, 2, 3],
        SequenceRef(5),
        None,
        Invalid,
        r"offset\[0\] \+ tokens: got 4 \+ 3 = 7, expected at most 6, the max_len",
    ),
    ([1], SequenceRef(5, start=True), 7, Invalid, r"offset: got 7, expected 0 to 6"),
    ([1], SequenceRef(5, start=True), -1, Invalid, r"offset: got -1, expected 0 to 6"),
    (
        [1],
        SequenceRef(5, start=True),
        [0, 0],
        Invalid,
        r"offset: got 2 values, expected one value, or one for each of 1 rows",
    ),
    (
        [[1]] * 5,
        SequenceRef(5, start=True),
        None,
        Unavailable,
        r"input_ids: 4 rows beside 1 that run exceed the limit of 4 rows",
    ),
    (
        [[1]] * 9,
        SequenceRef(6, start=True),
        None,
        TooLarge,
        r"input_ids: 9 rows beside 1 that run exceed the limit of 4 ",
    ),
]


@pytest.mark.parametrize(("ids", "turn", "offset", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_sequence_request_changes_nothing(
    engine: Engine, ids: Any, turn: SequenceRef, offset: Any, kind: type[PreblockError], message: str
) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [1, 2, 3, 4], SequenceRef(5, start=True))
        with pytest.raises(kind, match=message):
            await ask(room, model, ids, turn, offset)
        assert (where(room), sequences.rows, open_now(engine)) == ({("gpt", 1, 5): [4]}, 1, 1)

    run(engine, test)


def test_full_sequence_survives_rejected_request(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        assert await ask(room, model, IDS, SequenceRef(5, start=True)) == await stateless(engine, model, IDS, 0)
        with pytest.raises(Invalid, match=r"offset\[0\] \+ tokens: got 6 \+ 1 = 7, expected at most 6, the max_len"):
            await ask(room, model, [1], SequenceRef(5))
        assert where(room) == {("gpt", 1, 5): [6]}

    run(engine, test)


def test_failed_response_does_not_advance_sequence(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [1], SequenceRef(5, start=True))

        async def fail(turn: SequenceRef) -> None:
            async with room.answer(model, request([1], turn), RequestRecord("grpc")):
                raise TooLarge("outputs", "a test", "less")

        for turn in (SequenceRef(5), SequenceRef(5, end=True), SequenceRef(5, start=True), SequenceRef(6, start=True)):
            with pytest.raises(TooLarge):
                await fail(turn)
        assert (where(room), sequences.rows, open_now(engine)) == ({("gpt", 1, 5): [1]}, 1, 1)

    run(engine, test)


def test_concurrent_request_to_sequence_is_a_conflict(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        async with room.answer(model, request([1], SequenceRef(5, start=True)), RequestRecord("grpc")):
            for turn in (SequenceRef(5), SequenceRef(5, start=True)):
                with pytest.raises(Conflict, match=r"parameters\.sequence_id 5 has a request in progress"):
                    await ask(room, model, [1], turn)
            await ask(room, model, [1], SequenceRef(6, start=True))
        assert where(room) == {("gpt", 1, 6): [1], ("gpt", 1, 5): [1]}

    run(engine, test)


def test_sequence_rows_are_limited_per_stream_and_process(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
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
        assert (sequences.rows, open_now(engine)) == (5, 5)

    run(engine, test)


def test_only_the_idle_sequence_times_out(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [1], SequenceRef(5, start=True))
        await ask(room, model, [[1], [2]], SequenceRef(6, start=True))
        async with room.answer(
            model, request([1], SequenceRef(7, start=True)), RequestRecord("grpc")
        ):  # takes longer than it may wait
            for _ in range(3):
                await asyncio.sleep(0.1)
                await ask(room, model, [1], SequenceRef(5))
        assert where(room) == {("gpt", 1, 5): [4], ("gpt", 1, 7): [1]}
        with pytest.raises(Invalid, match="sequence_id 6 does not run"):
            await ask(room, model, [[1], [2]], SequenceRef(6))
        async with asyncio.timeout(10):
            while where(room):
                await asyncio.sleep(0.01)
        assert (sequences.rows, open_now(engine)) == (0, 0)
        await ask(room, model, [1], SequenceRef(5, start=True))  # and the room can be used again

    run(engine, test, sequence_idle_timeout_seconds=0.2)


def test_cancelled_request_leaves_no_sequence(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        async def never() -> None:
            async with room.answer(model, request([1], SequenceRef(5, start=True)), RequestRecord("grpc")):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(never())
        await asyncio.sleep(0)
        assert sequences.rows == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (where(room), sequences.rows, open_now(engine)) == ({}, 0, 0)

    run(engine, test)


def test_shared_sequences_need_a_single_worker(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        message = "parameters.sequence_id needs a single worker: any of the 2 workers here may get the next request"
        for turn in (SequenceRef("a", start=True), SequenceRef("a")):
            with pytest.raises(Invalid, match=message):
                await ask(sequences.shared_store, model, [1], turn)
        await ask(room, model, [1], SequenceRef("a", start=True))

    run(engine, test, workers=2)


def test_request_without_sequence_is_answered_statelessly(engine: Engine) -> None:
    model = engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        async with room.answer(model, request([1], None, 3), RequestRecord("grpc")) as answer:
            assert answer.arrays["embeddings"].tobytes() == await stateless(engine, model, [1], 3)
        with pytest.raises(Invalid, match="bias: this model has no attention bias"):
            async with room.answer(model, PairwiseBiasRequest(query_length=1, key_length=1), RequestRecord("grpc")):
                pass
        assert where(room) == {}

    run(engine, test)
