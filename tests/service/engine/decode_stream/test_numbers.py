"""Numbered steps of a decode stream: repeated, reused, rejected or failed."""

import asyncio

import pytest

from preblock.service.core.decode_ops import AppendOp, DecodeMessage, PingOp, ReorderOp, RewindOp
from preblock.service.core.errors import Conflict, Invalid, Unavailable
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord
from tests.service.engine.decode_stream.streams import array, do, feed, row, rows, stream_of


def test_repeated_step_is_answered_without_advancing(stream_engine: Engine) -> None:
    stream = stream_of(stream_engine, offset=(1, 2))
    first = feed(stream, rows([1], [2, 3]), 5, b"a", offset=array(1, 2))
    again = feed(stream, rows([1], [2, 3]), 5, b"a", offset=array(1, 2))
    assert again.arrays["embeddings"].tobytes() == first.arrays["embeddings"].tobytes()
    assert again.next_offset.tolist() == first.next_offset.tolist() == stream.offset.tolist() == [2, 4]
    assert feed(stream, rows([1], [1]), 6, b"b").next_offset.tolist() == [3, 5]


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
