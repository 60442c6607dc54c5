"""Sequences in failed, concurrent, cancelled and idle requests, and their limits."""

import asyncio

import pytest

from preblock.service.core.errors import Conflict, Invalid, TooLarge, Unavailable
from preblock.service.core.types import SequenceRef
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.observability.context import RequestRecord
from tests.service.engine.sequences.requests import ask, open_now, request, run, where


def test_failed_response_does_not_advance_sequence(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
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
    model = sequence_engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        async with room.answer(model, request([1], SequenceRef(5, start=True)), RequestRecord("grpc")):
            for turn in (SequenceRef(5), SequenceRef(5, start=True)):
                with pytest.raises(Conflict, match=r"parameters\.sequence_id 5 has a request in progress"):
                    await ask(room, model, [1], turn)
            await ask(room, model, [1], SequenceRef(6, start=True))
        assert where(room) == {("gpt", 1, 6): [1], ("gpt", 1, 5): [1]}

    run(sequence_engine, test)


def test_sequence_rows_are_limited_per_stream_and_process(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

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
        assert (sequences.rows, open_now(sequence_engine)) == (5, 5)

    run(sequence_engine, test)


def test_only_the_idle_sequence_times_out(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
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


def test_cancelled_request_leaves_no_sequence(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

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
        assert (where(room), sequences.rows, open_now(sequence_engine)) == ({}, 0, 0)

    run(sequence_engine, test)


def test_shared_sequences_need_a_single_worker(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        message = "parameters.sequence_id needs a single worker: any of the 2 workers here may get the next request"
        for turn in (SequenceRef("a", start=True), SequenceRef("a")):
            with pytest.raises(Invalid, match=message):
                await ask(sequences.shared_store, model, [1], turn)
        await ask(room, model, [1], SequenceRef("a", start=True))

    run(sequence_engine, test, workers=2)
