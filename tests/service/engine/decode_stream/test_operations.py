"""Operations of a decode stream. Oracle: one request to the engine."""

import numpy as np
import pytest

from preblock.service.core.decode_ops import AppendOp, CloseOp, DropOp, Operation, PingOp, ReorderOp, RewindOp, StepOp
from preblock.service.core.errors import ClientFault, Conflict, Invalid, TooLarge
from preblock.service.core.types import TokenRows
from preblock.service.engine.engine import Engine
from tests.service.engine.decode_stream.streams import array, do, feed, row, rows, stream_of, whole


def test_steps_equal_one_request_bit_for_bit(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(2,))
    steps = [row(1), row(2, 3, 4), row(5, 6)]
    parts = [feed(stream, step).arrays["embeddings"] for step in steps]
    one = whole(stream, input_ids=[1, 2, 3, 4, 5, 6], offset=2)
    assert np.concatenate(parts, 1).tobytes() == one
    assert stream.offset.tolist() == [8]


def test_rows_advance_by_their_own_lengths(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(0, 3, 5))
    first = feed(stream, rows([1, 2], [], [3]))
    assert (first.lengths.tolist(), first.next_offset.tolist(), stream.offset.tolist()) == (
        [2, 0, 1],
        [2, 3, 6],
        [2, 3, 6],
    )
    assert first.tensors["embeddings"].shape == (3, 4)
    assert first.arrays["embeddings"].tobytes() == whole(stream, input_ids=[[1, 2], [3]], offset=[0, 5])
    second = feed(stream, rows([4], [5], [6]))
    assert second.tensors["embeddings"].shape == (3, 1, 4)
    assert second.arrays["embeddings"].tobytes() == whole(stream, input_ids=[[4], [5], [6]], offset=[2, 3, 6])
    third = feed(stream, rows([], [7, 8], []))
    assert third.arrays["embeddings"].tobytes() == whole(stream, input_ids=[[7, 8]], offset=4)
    assert stream.offset.tolist() == [3, 6, 7]


def test_step_with_empty_rows_has_segments_masks_and_positions(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(1, 1, 1))
    answer = feed(
        stream,
        rows([1, 2], [], [3, 4]),
        attention_mask=rows([0, 1], [], [1, 1]),
        indices={"token_type_ids": rows([0, 1], [], [1, 0])},
    )
    assert stream.offset.tolist() == [2, 1, 3]
    fields = {"input_ids": [[1, 2], [3, 4]], "offset": 1, "token_type_ids": [[0, 1], [1, 0]]}
    assert answer.arrays["embeddings"].tobytes() == whole(stream, **fields, attention_mask=[[0, 1], [1, 1]])
    answer = feed(stream, rows([1], [2, 3], []), position_ids=rows([7], [0, 4], []))
    assert answer.arrays["embeddings"].tobytes() == whole(stream, input_ids=[[1], [2, 3]], position_ids=[[7], [0, 4]])
    assert stream.offset.tolist() == [8, 5, 3]


def test_row_of_only_padding_keeps_its_offset(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(2, 3))
    feed(stream, rows([1], [2]), position_ids=rows([5], [6]), attention_mask=rows([0], [1]))
    assert stream.offset.tolist() == [2, 7]


def test_operations_change_row_offsets(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(4, 5, 6))
    for operation, offsets in (
        (PingOp(), [4, 5, 6]),
        (RewindOp(array(3, 5, 0)), [3, 5, 0]),
        (ReorderOp(array(1, 1, 0)), [5, 5, 3]),
        (AppendOp(array(8, 0)), [5, 5, 3, 8, 0]),
        (DropOp(array(3, 0)), [5, 3, 0]),
        (RewindOp(array(0)), [0, 0, 0]),
        (CloseOp(), [0, 0, 0]),
        (DropOp(array(0, 1, 2)), []),
        (AppendOp(array(2)), [2]),
        (ReorderOp(array()), []),
    ):
        assert do(stream, operation) is None
        assert stream.offset.tolist() == offsets


def test_rewound_row_can_be_fed_again(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine)
    feed(stream, row(1, 2, 3, 4))
    do(stream, RewindOp(array(2)))
    assert feed(stream, row(5)).arrays["embeddings"].tobytes() == whole(stream, input_ids=[5], offset=2)
    assert stream.offset.tolist() == [3]


@pytest.mark.parametrize(
    ("operation", "kind", "message"),
    [
        (RewindOp(array(4, 4)), Invalid, r"^rewind\[1\]: got 4, expected 0 to 3$"),
        (RewindOp(array(-1)), Invalid, r"^rewind\[0\]: got -1, expected 0 to 4$"),
        (RewindOp(array(0, 0, 0)), Invalid, r"^rewind: got 3 values, expected one value, or one for each of 2 rows$"),
        (ReorderOp(array(0, 2)), Invalid, r"^reorder\[1\]: got 2, expected 0 to 1$"),
        (ReorderOp(array(-1)), Invalid, r"^reorder\[0\]: got -1, expected 0 to 1$"),
        (ReorderOp(array(*[0] * 7)), TooLarge, r"^reorder: got 7 rows, expected at most 6 rows of a stream$"),
        (AppendOp(array(9)), Invalid, r"^append: got 9, expected 0 to 8$"),
        (AppendOp(array(0, -1)), Invalid, r"^append\[1\]: got -1, expected 0 to 8$"),
        (AppendOp(array(*[0] * 5)), TooLarge, r"^append: got 7 rows, expected at most 6 rows of a stream$"),
        (DropOp(array(2)), Invalid, r"^drop\[0\]: got 2, expected 0 to 1$"),
        (
            StepOp(input_ids=rows([1], [1]), offset=array(4, 2)),
            Conflict,
            r"^offset\[1\]: got 2, expected 3, the offset",
        ),
        (StepOp(input_ids=rows([1], [1]), offset=array(4)), Conflict, r"^offset\[1\]: got 4, expected 3, the offset"),
        (StepOp(input_ids=rows([], [11])), Invalid, r"^input_ids\[1\]\[0\]: got 11, expected 0 to 10$"),
        (StepOp(input_ids=rows([], [1] * 6)), Invalid, r"^offset\[1\] \+ tokens: got 3 \+ 6 = 9, expected at most 8,"),
        (StepOp(input_ids=rows([], [1]), position_ids=rows([1], [])), Invalid, r"^position_ids\[0\]: got 1 values"),
        (StepOp(input_ids=rows([], [])), Invalid, r"^input_ids\[0\]: got an empty row, expected at least one id$"),
        (StepOp(input_ids=rows([1])), Invalid, r"^input_ids: got 1 rows, expected 2 rows, as are running$"),
    ],
)
def test_invalid_operation_changes_nothing(
    stream_engine: Engine, operation: Operation, kind: type[ClientFault], message: str
) -> None:
    stream = stream_of(stream_engine, offset=(4, 3))
    with pytest.raises(kind, match=message):
        do(stream, operation)
    assert stream.offset.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("step", "segments", "kind"),
    [
        (row(11), None, Invalid),
        (row(-1), None, Invalid),
        (row(), None, Invalid),
        (row(1), row(2), Invalid),
        (row(1), row(0, 0), Invalid),
        (TokenRows(np.array([1, 2]), np.array([1, 1])), None, Invalid),
        (TokenRows(np.zeros(0, np.int64), np.zeros(0, np.int64)), None, Invalid),
        (row(1, 1, 1, 1, 1, 1), None, Invalid),
        (row(1, 1, 1, 1, 1, 1, 1), None, TooLarge),
    ],
)
def test_invalid_step_changes_nothing(
    stream_engine: Engine, step: TokenRows, segments: TokenRows | None, kind: type[ClientFault]
) -> None:
    stream = stream_of(stream_engine, offset=(3,))
    with pytest.raises(kind):
        feed(stream, step, indices={} if segments is None else {"token_type_ids": segments})
    assert stream.offset.tolist() == [3]
    assert feed(stream, row(1, 2, 3, 4, 5)).next_offset.tolist() == [8]


def test_full_stream_can_be_rewound(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(6,))
    assert feed(stream, row(1, 2)).next_offset.tolist() == [8]
    with pytest.raises(Invalid, match=r"got 8 \+ 1 = 9, expected at most 8"):
        feed(stream, row(1))
    do(stream, RewindOp(array(7)))
    assert feed(stream, row(2)).next_offset.tolist() == [8]


@pytest.mark.parametrize("offset", [-1, 9, 2**63 - 1])
def test_stream_offset_out_of_range_is_rejected(stream_engine: Engine, offset: int) -> None:
    with pytest.raises(Invalid, match=f"^offset: got {offset}, expected 0 to 8$"):
        stream_of(stream_engine, offset=(offset,))
    with pytest.raises(Invalid, match=rf"^offset\[1\]: got {offset}, expected 0 to 8$"):
        stream_of(stream_engine, offset=(8, offset))


@pytest.mark.parametrize("offset", [0, 8])
def test_stream_offset_up_to_max_len_is_accepted(stream_engine: Engine, offset: int) -> None:
    assert stream_of(stream_engine, offset=(offset,)).offset.tolist() == [offset]


def test_scalar_stream_offset_applies_to_all_rows(stream_engine: Engine) -> None:
    assert stream_of(stream_engine, offset=(3,), rows=2).offset.tolist() == [3, 3]
    assert stream_of(stream_engine, offset=(3,), rows=0).offset.tolist() == []
    with pytest.raises(TooLarge, match=r"^rows: got 7 rows, expected at most 6 rows of a stream$"):
        stream_of(stream_engine, rows=7)


def test_dtype_and_outputs_are_checked_at_stream_open(stream_engine: Engine) -> None:
    with pytest.raises(Invalid, match=r"^dtype: got float64, expected float32, float16, bfloat16$"):
        stream_of(stream_engine, dtype="float64")
    with pytest.raises(Invalid, match=r"^output: got nope, expected embeddings, token_embeddings$"):
        stream_of(stream_engine, outputs=("embeddings", "nope"))


def test_dtype_and_outputs_apply_to_every_step(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, "gpt", dtype="float16", outputs=("token_embeddings", "embeddings"))
    for _ in range(2):
        tensors = feed(stream, row(1)).tensors
        assert list(tensors) == ["token_embeddings", "embeddings"]
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
