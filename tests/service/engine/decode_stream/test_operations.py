"""Operations of a decode stream. Oracle: one request to the engine."""

import re

import numpy as np
import pytest

from preblock.service.core.decode_ops import AppendOp, CloseOp, DropOp, Operation, PingOp, ReorderOp, RewindOp
from preblock.service.core.errors import ClientFault, Conflict, Invalid, TooLarge
from preblock.service.core.types import TokenRequest
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
    assert first.lengths.tolist() == [2, 0, 1]
    assert first.next_offset.tolist() == stream.offset.tolist() == [2, 3, 6]
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
    stream = stream_of(stream_engine, offset=(4,))
    feed(stream, row(1, 2, 3, 4))
    with pytest.raises(Invalid, match=r"got 8 \+ 1 = 9, expected at most 8"):
        feed(stream, row(1))
    do(stream, RewindOp(array(6)))
    assert feed(stream, row(5)).arrays["embeddings"].tobytes() == whole(stream, input_ids=[5], offset=6)
    assert stream.offset.tolist() == [7]


@pytest.mark.parametrize(
    ("operation", "kind", "message"),
    [
        (RewindOp(array(4, 4)), Invalid, "rewind[1]: got 4, expected 0 to 3"),
        (RewindOp(array(-1)), Invalid, "rewind[0]: got -1, expected 0 to 4"),
        (RewindOp(array(0, 0, 0)), Invalid, "rewind: got 3 values, expected one value, or one for each of 2 rows"),
        (ReorderOp(array(0, 2)), Invalid, "reorder[1]: got 2, expected 0 to 1"),
        (ReorderOp(array(-1)), Invalid, "reorder[0]: got -1, expected 0 to 1"),
        (ReorderOp(array(*[0] * 7)), TooLarge, "reorder: got 7 rows, expected at most 6 rows of a stream"),
        (AppendOp(array(9)), Invalid, "append: got 9, expected 0 to 8"),
        (AppendOp(array(0, -1)), Invalid, "append[1]: got -1, expected 0 to 8"),
        (AppendOp(array(*[0] * 5)), TooLarge, "append: got 7 rows, expected at most 6 rows of a stream"),
        (DropOp(array(2)), Invalid, "drop[0]: got 2, expected 0 to 1"),
        (
            TokenRequest(input_ids=rows([1], [1]), offset=array(4, 2)),
            Conflict,
            "offset[1]: got 2, expected 3, the offset",
        ),
        (TokenRequest(input_ids=rows([1], [1]), offset=array(4)), Conflict, "offset[1]: got 4, expected 3, the offset"),
        (TokenRequest(input_ids=rows([], [11])), Invalid, "input_ids[1][0]: got 11, expected 0 to 10"),
        (TokenRequest(input_ids=rows([], [1] * 6)), Invalid, "offset[1] + tokens: got 3 + 6 = 9, expected at most 8,"),
        (TokenRequest(input_ids=rows([1] * 4, [1] * 3)), TooLarge, "input_ids: got 7 tokens"),
        (TokenRequest(input_ids=rows([], [1]), position_ids=rows([1], [])), Invalid, "position_ids[0]: got 1 values"),
        (
            TokenRequest(input_ids=rows([], [1]), indices={"token_type_ids": rows([], [2])}),
            Invalid,
            "token_type_ids[1][0]: got 2",
        ),
        (
            TokenRequest(input_ids=rows([], [1]), indices={"token_type_ids": rows([], [0, 0])}),
            Invalid,
            "token_type_ids[1]: got 2 values",
        ),
        (TokenRequest(input_ids=rows([], [])), Invalid, "input_ids[0]: got an empty row, expected at least one id"),
        (TokenRequest(input_ids=rows()), Invalid, "input_ids: got 0 rows, expected 2 rows, as are running"),
        (TokenRequest(input_ids=rows([1])), Invalid, "input_ids: got 1 rows, expected 2 rows, as are running"),
    ],
)
def test_invalid_operation_changes_nothing(
    stream_engine: Engine, operation: Operation, kind: type[ClientFault], message: str
) -> None:
    stream = stream_of(stream_engine, offset=(4, 3))
    with pytest.raises(kind, match="^" + re.escape(message)):
        do(stream, operation)
    assert stream.offset.tolist() == [4, 3]


def test_stream_offset_out_of_range_is_rejected(stream_engine: Engine) -> None:
    for offset in (-1, 9, 2**63 - 1):
        for given, field in (((offset,), "offset"), ((8, offset), "offset[1]")):
            with pytest.raises(Invalid) as refused:
                stream_of(stream_engine, offset=given)
            assert (refused.value.field, refused.value.got) == (field, str(offset))
    assert stream_of(stream_engine, offset=(0, 8)).offset.tolist() == [0, 8]


def test_scalar_stream_offset_applies_to_all_rows(stream_engine: Engine) -> None:
    for count in (2, 0):
        assert stream_of(stream_engine, offset=(3,), rows=count).offset.tolist() == [3] * count
    with pytest.raises(TooLarge) as refused:
        stream_of(stream_engine, rows=7)
    assert refused.value.field == "rows"


def test_dtype_and_outputs_are_checked_at_stream_open(stream_engine: Engine) -> None:
    for options, field, got in (({"dtype": "float64"}, "dtype", "float64"), ({"outputs": ("no",)}, "output", "no")):
        with pytest.raises(Invalid) as refused:
            stream_of(stream_engine, **options)
        assert (refused.value.field, refused.value.got) == (field, got)


def test_dtype_and_outputs_apply_to_every_step(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, "gpt", dtype="float16", outputs=("token_embeddings", "embeddings"))
    for _ in range(2):
        tensors = feed(stream, row(1)).tensors
        assert list(tensors) == ["token_embeddings", "embeddings"]
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.float16)}
