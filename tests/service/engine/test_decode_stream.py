"""Steps of a stream: errors that change nothing, and numbers. tests/service/api/http/streaming asks servers."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.service.core.decode_ops import AppendOp, DecodeMessage, DecodeOptions, Operation, RewindOp
from preblock.service.core.errors import Conflict, Invalid, Unavailable
from preblock.service.core.types import EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.decode_stream import DecodeState
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord
from tests.support.engines import open_engine


@pytest.fixture(scope="module")
def stream_engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository) as engine:
        yield engine


def rows(*each: list[int]) -> TokenRows:
    values = [value for row in each for value in row]
    return TokenRows(np.array(values, np.int64), np.array([len(row) for row in each], np.int64))


def row(*ids: int) -> TokenRows:
    return rows(list(ids))


def array(*values: int) -> Any:
    return np.array(values, np.int64)


def stream_of(engine: Engine, name: str = "bert", offset: tuple[int, ...] = (0,)) -> DecodeState:
    return DecodeState(engine, engine.repository.get(name), DecodeOptions(offset=array(*offset), rows=len(offset)))


def do(stream: DecodeState, operation: Operation, number: int = 0, digest: bytes = b"") -> EmbedResult | None:
    return asyncio.run(stream.do(DecodeMessage(operation, number, digest), RequestRecord("decode")))


def feed(stream: DecodeState, ids: TokenRows, number: int, digest: bytes) -> EmbedResult:
    answer = do(stream, TokenRequest(input_ids=ids), number, digest)
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        ([11], {}, "input_ids[1][0]: got 11, expected 0 to 10"),
        ([1] * 6, {}, "offset[1] + tokens: got 3 + 6 = 9, expected at most 8,"),
        ([1], {"position_ids": rows([1], [])}, "position_ids[0]: got 1 values"),
        ([1], {"indices": {"token_type_ids": rows([], [2])}}, "token_type_ids[1][0]: got 2"),
    ],
)
def test_error_beside_an_empty_row_names_the_place(
    stream_engine: Engine, ids: list[int], fields: dict[str, Any], message: str
) -> None:
    stream = stream_of(stream_engine, offset=(4, 3))
    with pytest.raises(Invalid, match="^" + re.escape(message)):
        do(stream, TokenRequest(input_ids=rows([], ids), **fields))
    assert stream.offset.tolist() == [4, 3]


def test_repeated_numbered_operation_is_applied_once(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(1, 2))
    for _ in range(3):
        do(stream, AppendOp(array(7)), 2, b"b")
        assert stream.offset.tolist() == [1, 2, 7]


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
