"""Streams of steps and other operations. Oracle: one request to the engine."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.native_json import read_embed
from preblock.service.core.decode_ops import (
    AppendOp,
    CloseOp,
    DecodeMessage,
    DecodeOptions,
    DropOp,
    Operation,
    PingOp,
    ReorderOp,
    RewindOp,
)
from preblock.service.core.errors import ClientFault, Conflict, Invalid, TooLarge, Unavailable
from preblock.service.core.types import EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.decode_stream import DecodeState
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord
from tests.support.engines import ask_engine, open_engine


@pytest.fixture(scope="module")
def stream_engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository, max_request_tokens=6) as engine:
        yield engine


def rows(*each: list[int]) -> TokenRows:
    values = [value for row in each for value in row]
    return TokenRows(np.array(values, np.int64), np.array([len(row) for row in each], np.int64))


def row(*ids: int) -> TokenRows:
    return rows(list(ids))


def array(*values: int) -> Any:
    return np.array(values, np.int64)


def stream_of(engine: Engine, name: str = "bert", offset: tuple[int, ...] = (0,), **options: Any) -> DecodeState:
    wanted = DecodeOptions(offset=array(*offset), **{"rows": len(offset)} | options)
    return DecodeState(engine, engine.repository.get(name), wanted)


def do(stream: DecodeState, operation: Operation, number: int = 0, digest: bytes = b"") -> EmbedResult | None:
    return asyncio.run(stream.do(DecodeMessage(operation, number, digest), RequestRecord("decode")))


def feed(stream: DecodeState, ids: TokenRows, number: int = 0, digest: bytes = b"", **parts: Any) -> EmbedResult:
    answer = do(stream, TokenRequest(input_ids=ids, **parts), number, digest)
    assert answer is not None
    return answer


def whole(stream: DecodeState, **fields: Any) -> bytes:
    """Return the vectors of one request, the rows one after another."""
    request = read_embed(fields, indices=stream.model.manifest.indices).request
    return asyncio.run(ask_engine(stream._engine, stream.model, request)).arrays["embeddings"].tobytes()


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


@pytest.mark.parametrize(
    ("operation", "kind", "message"),
    [
        (RewindOp(array(4, 4)), Invalid, "rewind[1]: got 4, expected 0 to 3"),
        (RewindOp(array(-1)), Invalid, "rewind[0]: got -1, expected 0 to 4"),
        (RewindOp(array(0, 0, 0)), Invalid, "rewind: got 3 values, expected one value, or one for each of 2 rows"),
        (ReorderOp(array(0, 2)), Invalid, "reorder[1]: got 2, expected 0 to 1"),
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
        (TokenRequest(input_ids=rows([], [11])), Invalid, "input_ids[1][0]: got 11, expected 0 to 10"),
        (TokenRequest(input_ids=rows([], [1] * 6)), Invalid, "offset[1] + tokens: got 3 + 6 = 9, expected at most 8,"),
        (TokenRequest(input_ids=rows([1] * 4, [1] * 3)), TooLarge, "input_ids: got 7 tokens"),
        (TokenRequest(input_ids=rows([], [1]), position_ids=rows([1], [])), Invalid, "position_ids[0]: got 1 values"),
        (
            TokenRequest(input_ids=rows([], [1]), indices={"token_type_ids": rows([], [2])}),
            Invalid,
            "token_type_ids[1][0]: got 2",
        ),
        (TokenRequest(input_ids=rows([], [])), Invalid, "input_ids[0]: got an empty row, expected at least one id"),
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


@pytest.mark.parametrize(
    ("options", "field", "got"),
    [
        *(({"offset": (offset,)}, "offset", str(offset)) for offset in (-1, 9, 2**63 - 1)),
        ({"offset": (8, 9)}, "offset[1]", "9"),
        ({"rows": 7}, "rows", "7"),
        ({"dtype": "float64"}, "dtype", "float64"),
        ({"outputs": ("no",)}, "output", "no"),
    ],
)
def test_stream_with_bad_options_is_refused(
    stream_engine: Engine, options: dict[str, Any], field: str, got: str
) -> None:
    with pytest.raises(ClientFault) as refused:
        stream_of(stream_engine, **options)
    assert (refused.value.field, refused.value.got.split()[0]) == (field, got)


def test_scalar_stream_offset_applies_to_all_rows(stream_engine: Engine) -> None:
    for count in (2, 0):
        assert stream_of(stream_engine, offset=(8,), rows=count).offset.tolist() == [8] * count


def test_repeated_numbered_operation_is_applied_once(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(1, 2))
    for _ in range(2):
        do(stream, ReorderOp(array(1, 0)), 1, b"a")
        assert stream.offset.tolist() == [2, 1]
    for _ in range(2):
        do(stream, AppendOp(array(7)), 2, b"b")
        assert stream.offset.tolist() == [2, 1, 7]
    do(stream, PingOp())
    do(stream, AppendOp(array(7)), 2, b"b")
    assert stream.offset.tolist() == [2, 1, 7]


def test_reused_step_number_is_a_conflict(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine)
    feed(stream, row(1), 5, b"a")
    for number, digest in ((5, b"b"), (4, b"a"), (1, b"")):
        with pytest.raises(Conflict) as refused:
            feed(stream, row(1), number, digest)
        assert (refused.value.field, refused.value.got) == ("step", str(number))
        assert refused.value.expected == "more than 5, or 5 again with the same content"
    assert stream.offset.tolist() == [1]
    do(stream, RewindOp(array(1)))
    with pytest.raises(Conflict, match=r"^step: got 5, expected more than 5$"):  # the answer changed since
        feed(stream, row(1), 5, b"a")


def test_number_of_rejected_step_can_be_reused(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine)
    with pytest.raises(Invalid):
        feed(stream, row(11), 5, b"a")
    assert feed(stream, row(1), 5, b"b").next_offset.tolist() == [1]


def test_failed_step_response_rolls_back_the_stream(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, "gpt", offset=(1,))

    async def fail() -> None:
        with stream.attempt():
            await stream.do(DecodeMessage(TokenRequest(input_ids=row(1, 2)), 3, b"a"), RequestRecord("decode"))
            assert stream.offset.tolist() == [3]
            raise Unavailable("queue", "full", "room")

    with pytest.raises(Unavailable):
        asyncio.run(fail())
    assert stream.offset.tolist() == [1]
    assert feed(stream, row(1), 3, b"b").next_offset.tolist() == [2]
