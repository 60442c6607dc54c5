"""Offsets of sequences. Oracle: requests without a sequence."""

import re
from typing import Any

import numpy as np
import pytest

from preblock.service.core.errors import Conflict, Invalid, PreblockError, TooLarge, Unavailable
from preblock.service.core.types import PairwiseBiasRequest, SequenceRef, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences, SequenceStore
from preblock.service.observability.context import RequestRecord
from tests.service.engine.sequences.requests import IDS, ask, open_now, request, run, stateless, where


def test_sequence_request_continues_at_last_offset(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        for begin, end, offset, turn in (
            (0, 2, None, SequenceRef(5, start=True)),
            (2, 3, None, SequenceRef(5)),
            (3, 5, 3, SequenceRef(5)),
            (5, 6, None, SequenceRef(5, end=True)),
        ):
            found = await ask(room, model, IDS[begin:end], turn, offset)
            assert found == await stateless(sequence_engine, model, IDS[begin:end], begin)
            running = {} if turn.end else {("gpt", 1, 5): [end]}
            assert (where(room), open_now(sequence_engine)) == (running, len(running))

    run(sequence_engine, test)


def test_sequence_start_resets_the_offset(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
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

    async def test(_: Sequences, room: SequenceStore) -> None:
        for length, model in enumerate(models, 1):
            await ask(room, model, IDS[:length], SequenceRef(5, start=True))
        with pytest.raises(Invalid):
            await ask(room, models[0], [1], SequenceRef("5"))
        assert where(room) == {("bert", 1, 5): [1], ("bert", 2, 5): [2], ("gpt", 1, 5): [3]}
        for length, model in enumerate(models, 1):
            assert await ask(room, model, [1], SequenceRef(5)) == await stateless(sequence_engine, model, [1], length)

    run(sequence_engine, test, max_stream_sequence_rows=6)


def test_padding_and_positions_advance_sequence_rows(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")
    mask, positions = (TokenRows.of_array(np.array(values)) for values in ([[0, 1], [1, 1]], [[3, 4], [0, 1]]))

    async def test(_: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5, start=True), attention_mask=mask)
        assert where(room)["gpt", 1, 5] == [1, 2]
        found = await ask(room, model, [[1, 2], [3, 4]], SequenceRef(5), [1, 2], position_ids=positions)
        assert found == await stateless(sequence_engine, model, [[1, 2], [3, 4]], None, position_ids=positions)
        assert where(room)["gpt", 1, 5] == [5, 2]

    run(sequence_engine, test)


REFUSED: list[tuple[Any, SequenceRef, Any, type[PreblockError], str]] = [
    ([1], SequenceRef(6), None, Invalid, "parameters.sequence_id 6 does not run on gpt version 1; "),
    ([1], SequenceRef("5"), None, Invalid, "parameters.sequence_id '5' does not run on gpt version 1"),
    ([[1], [2]], SequenceRef(5), None, Invalid, "input_ids: got 2 rows, expected one row, as are running"),
    ([1], SequenceRef(5), 3, Conflict, "offset[0]: got 3, expected 4, the offset of this row"),
    ([1], SequenceRef(5, end=True), 5, Conflict, "offset[0]: got 5, expected 4, the offset of this row"),
    ([1], SequenceRef(5), [4, 4], Invalid, "offset: got 2 values"),
    ([7], SequenceRef(5), None, Invalid, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([7], SequenceRef(5, start=True), None, Invalid, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([7], SequenceRef(5, end=True), None, Invalid, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([1, 2, 3], SequenceRef(5), None, Invalid, "offset[0] + tokens: got 4 + 3 = 7"),
    ([1], SequenceRef(5, start=True), 7, Invalid, "offset: got 7, expected 0 to 6"),
    ([1], SequenceRef(5, start=True), -1, Invalid, "offset: got -1, expected 0 to 6"),
    ([1], SequenceRef(5, start=True), [0, 0], Invalid, "offset: got 2 values"),
    ([[1]] * 5, SequenceRef(5, start=True), None, Unavailable, "input_ids: 4 rows beside 1 that run exceed"),
    ([[1]] * 9, SequenceRef(6, start=True), None, TooLarge, "input_ids: 9 rows beside 1 that run exceed"),
]


@pytest.mark.parametrize(("ids", "turn", "offset", "kind", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_sequence_request_changes_nothing(
    sequence_engine: Engine, ids: Any, turn: SequenceRef, offset: Any, kind: type[PreblockError], message: str
) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(sequences: Sequences, room: SequenceStore) -> None:
        await ask(room, model, [1, 2, 3, 4], SequenceRef(5, start=True))
        with pytest.raises(kind, match="^" + re.escape(message)):
            await ask(room, model, ids, turn, offset)
        assert (where(room), sequences.rows, open_now(sequence_engine)) == ({("gpt", 1, 5): [4]}, 1, 1)

    run(sequence_engine, test)


def test_request_without_sequence_is_answered_statelessly(sequence_engine: Engine) -> None:
    model = sequence_engine.repository.get("gpt")

    async def test(_: Sequences, room: SequenceStore) -> None:
        async with room.answer(model, request([1], None, 3), RequestRecord("grpc")) as answer:
            assert answer.arrays["embeddings"].tobytes() == await stateless(sequence_engine, model, [1], 3)
        with pytest.raises(Invalid, match="bias: this model has no attention bias"):
            async with room.answer(model, PairwiseBiasRequest(query_length=1, key_length=1), RequestRecord("grpc")):
                pass
        assert where(room) == {}

    run(sequence_engine, test)
