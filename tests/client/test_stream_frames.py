"""Frames of a decode stream as the client reads them, from scripted servers."""

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from preblock.client import errors
from preblock.client.async_stream import AsyncDecodeStream
from preblock.client.messages import MAX_FURTHER_INPUTS
from preblock.client.sync_stream import DecodeStream
from tests.client.conftest import WaitingStream, raises_kind

HEADER = struct.Struct("<4sBBHIIIB3s")


FIELDS: dict[str, Any] = {"offset": [5], "rows": 1, "output": ["embeddings"], "dtype": "float32"}
OPENED = json.dumps({"version": 1, "identity": "0" * 64, "next_offset": [5], "indices": ["token_type_ids"]}).encode()


class ScriptedSocket:
    """A socket for a test: `sent` holds the paths and the messages, `answers` the next answers or errors."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[str | bytes] = []
        self.pauses: list[float] = []

    def owner(self) -> int:
        return 1

    def connect(self, path: str) -> None:
        self.sent.append(path)

    def exchange(self, message: str | bytes) -> bytes:
        self.sent.append(message)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        self.sent.append(f"close after {kind}")


def opened(*answers: bytes | Exception, resume: bool = False) -> tuple[DecodeStream, ScriptedSocket]:
    """Return an open stream with one row at offset 5, and its socket."""
    socket: Any = ScriptedSocket(OPENED, *answers)
    stream = DecodeStream(socket, "m", None, dict(FIELDS), retries=1, resume=resume)
    stream.__enter__()
    assert socket.sent == ["/models/m/decode", json.dumps({"open": FIELDS})]
    socket.sent.clear()
    return stream, socket


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b'{"closing":"idle","next_offset":[5]}',
        b'{"next_offset":[5]}',
        b'{"next_offset":[6],"shape":[1,1,1],"dtype":"float32","embeddings":"AAAAAA==","step":2}',
        b"{",
        HEADER.pack(b"INCQ", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 4, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 8, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 0, 2, 1, 1, 1, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 6),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 9, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\2\0\0") + struct.pack("<qIIIff", 6, 1, 1, 1, 0.5, 1),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0") + struct.pack("<qII", 6, 1, 1) + bytes(3),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0") + struct.pack("<qIIff", 6, 1, 1, 0.5, 1),
        HEADER.pack(b"PRBK", 2, 11, 0, 0, 1, 0, 0, bytes(3)) + struct.pack("<q", 5) + b"idle",
    ],
)
def test_invalid_response_frame_closes_stream(frame: bytes) -> None:
    stream, _ = opened(frame)
    for _ in range(2):
        with pytest.raises(errors.StreamClosed) as raised:
            stream.step([1])
        assert raised.value.offset == stream.offset == [5]


def test_frame_of_another_version_is_named() -> None:
    stream, _ = opened(HEADER.pack(b"PRBK", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0"))
    with pytest.raises(errors.StreamClosed, match=r"version 1, expected magic b'PRBK', version 2"):
        stream.step([1])


@pytest.mark.parametrize("message", [b"", b"\xff", b"[]", b"{}"])
def test_stream_opening_with_invalid_response_raises_error(message: bytes) -> None:
    socket: Any = ScriptedSocket(message)
    with pytest.raises(errors.ConnectionFailed, match="the server opened no decode stream") as raised:
        DecodeStream(socket, "m", None, FIELDS, retries=0, resume=False).__enter__()
    assert socket.sent[-1] == f"close after {raised.type}"


def test_stream_frames_match_documented_format() -> None:
    answer = HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIIff", 7, 2, 1, 0.5, -2)
    state = HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 6)
    stream, socket = opened(answer, state)
    assert stream.step([7, 8], token_type_ids=[0, 1]).tolist() == [[[0.5], [-2]]]
    header = HEADER.pack(b"PRBK", 2, 1, 256 + 4, 1, 1, 2, 0, bytes(3))
    assert socket.sent == [header + struct.pack("<qqqqqI", 7, 8, 0, 1, 5, 2)]
    assert stream.offset == [7]
    stream.rewind(6)
    assert socket.sent[1] == HEADER.pack(b"PRBK", 2, 4, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 6)
    assert stream.offset == [6]


def test_step_of_parts_matches_documented_message() -> None:
    answer = b'{"next_offset":[6],"shape":[1,1,1],"dtype":"float32","use_as":"","embeddings":"AAAAPw==","step":1}'
    closing = b'{"closing":"idle","next_offset":[6]}'
    stream, socket = opened(answer, closing)
    assert stream.step(parts=[{"vectors": np.full((1, 1), 0.5, np.float32)}]).tolist() == [[[0.5]]]
    (sent,) = socket.sent
    assert json.loads(sent) == {"parts": [{"vectors": "AAAAPw=="}], "step": 1, "offset": [5]}
    with pytest.raises(errors.StreamClosed, match=r"the service closed the stream \(idle\)") as raised:
        stream.step([1])
    assert raised.value.offset == [6]


def test_rejected_step_does_not_use_message_number() -> None:
    state = HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 5)
    stream, _ = opened(state)
    with raises_kind("Invalid"):
        stream.step([1], indices={"word": [1]})
    stream.ping()


def test_resuming_stream_reopens_at_its_offsets_and_version() -> None:
    state = HEADER.pack(b"PRBK", 2, 10, 0, 1, 2, 0, 0, bytes(3)) + struct.pack("<qq", 5, 5)
    stream, socket = opened(errors.ConnectionFailed("broke"), OPENED, state, resume=True)
    stream.reorder([0, 0])
    first, path, opening, again = socket.sent
    assert first == again
    assert path == "/models/m/versions/1/decode"
    assert json.loads(opening)["open"] == {"offset": [5], "rows": 1, "output": ["embeddings"], "dtype": "float32"}
    assert len(socket.pauses) == 1
    assert stream.offset == [5, 5]


def test_busy_stream_retries_message_on_same_connection() -> None:
    """`retry_after` of an error in an open stream is its least pause; the message gets a new number."""
    busy = HEADER.pack(b"PRBK", 2, 3, 0, 1, 0, 0, 0, bytes(3))
    busy += b'{"type":"urn:preblock:error:Unavailable","status":503,"detail":"full","retry_after":2}'
    state = HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 4)
    stream, socket = opened(busy, state)
    stream.rewind(4)
    assert [HEADER.unpack_from(frame)[4] for frame in socket.sent if isinstance(frame, bytes)] == [1, 2]
    assert len(socket.sent) == 2
    assert len(socket.pauses) == 1
    assert 2 <= socket.pauses[0] <= 2.25
    assert stream.offset == [4]


@pytest.mark.parametrize("stated", [b"", b',"retry_after":null', b',"retry_after":"soon"', b',"retry_after":31'])
def test_stream_error_without_usable_retry_after_is_not_retried(stated: bytes) -> None:
    refused = HEADER.pack(b"PRBK", 2, 3, 0, 1, 0, 0, 0, bytes(3))
    refused += b'{"type":"urn:preblock:error:Unavailable","status":503,"detail":"full"' + stated + b"}"
    stream, socket = opened(refused)
    with raises_kind("Unavailable"):
        stream.ping()
    assert socket.pauses == []


class AsyncScriptedSocket:
    """A `ScriptedSocket` for the asynchronous stream."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self._script = ScriptedSocket(*answers)
        self.owner, self.sent = self._script.owner, self._script.sent

    async def connect(self, path: str) -> None:
        self._script.connect(path)

    async def exchange(self, message: str | bytes) -> bytes:
        return self._script.exchange(message)

    async def sleep(self, seconds: float) -> None:
        self._script.sleep(seconds)

    async def close(self, kind: type[BaseException] | None, *error: object) -> None:
        self._script.close(kind, *error)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def async_stream(
    runner: asyncio.Runner, *answers: bytes | Exception, resume: bool = False, **fields: Any
) -> tuple[Any, AsyncScriptedSocket]:
    """Return an asynchronous stream with synchronous methods, which is not open yet, and its socket."""
    socket: Any = AsyncScriptedSocket(*answers)
    stream = AsyncDecodeStream(socket, "m", None, FIELDS | fields, retries=1, resume=resume)
    return WaitingStream(runner, stream), socket


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"{", "the server sent no answer of a decode stream: "),
        (HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 5), "an answer to another message"),
    ],
    ids=["malformed", "number 2"],
)
def test_async_stream_is_closed_by_wrong_answer(runner: asyncio.Runner, answer: bytes, message: str) -> None:
    stream, _ = async_stream(runner, OPENED, answer)
    stream.__aenter__()
    with pytest.raises(errors.StreamClosed, match=message):
        stream.ping()
    assert stream.offset == [5]


def test_async_stream_without_opening_raises_error(runner: asyncio.Runner) -> None:
    stream, socket = async_stream(runner, b"{}", rows=2)
    assert stream.offset == [5, 5]
    with pytest.raises(errors.ConnectionFailed, match="the server opened no decode stream"):
        stream.__aenter__()
    assert socket.sent[-1] == "close after <class 'preblock.client.errors.ConnectionFailed'>"


def test_async_stream_resumes_with_its_context(runner: asyncio.Runner) -> None:
    document = json.loads(OPENED) | {"next_context": [[3, 4]]}
    state = HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 5)
    answers = json.dumps(document).encode(), errors.ConnectionFailed("broke"), OPENED, state
    stream, socket = async_stream(runner, *answers, resume=True, context=[[1, 2]])
    stream.__aenter__()
    stream.ping()
    opening = [json.loads(sent)["open"]["context"] for sent in socket.sent if isinstance(sent, str) and "open" in sent]
    assert opening == [[[1, 2]], [[3, 4]]]


def test_input_without_a_flag_is_sent_as_json(runner: asyncio.Runner) -> None:
    names = [f"input{number}" for number in range(MAX_FURTHER_INPUTS + 1)]
    answer = b'{"next_offset":[6],"shape":[1,1,1],"dtype":"float32","use_as":"","embeddings":"AAAAPw==","step":1}'
    stream, socket = async_stream(runner, json.dumps(json.loads(OPENED) | {"indices": names}).encode(), answer)
    stream.__aenter__()
    assert stream.step([7], indices={names[-1]: [1]}).tolist() == [[[0.5]]]
    assert json.loads(socket.sent[-1]) == {"input_ids": [[7]], names[-1]: [[1]], "step": 1, "offset": [5]}
