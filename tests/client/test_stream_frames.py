"""Frames of a decode stream as the clients read them, from scripted servers."""

import json
import struct
from typing import Any

import pytest

from preblock.client import errors
from preblock.client.sync_stream import DecodeStream
from tests.client.conftest import raises_kind

HEADER = struct.Struct("<4sBBHIIIB3s")
FIELDS: dict[str, Any] = {"offset": [5], "rows": 1, "output": ["embeddings"], "dtype": "float32"}
ONE = struct.pack("<qIIf", 6, 1, 1, 0.5)
"""A body for one row of one token, whose vector has one value."""
OPENED = {"version": 1, "identity": "0" * 64, "next_offset": [5], "indices": ["token_type_ids"]}


class ScriptedSocket:
    """A socket for a test: `sent` holds the paths and the messages, `answers` the next answers or errors."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.sent: list[Any] = []
        self.pauses: list[float] = []

    def owner(self) -> int:
        return 1

    def connect(self, path: str) -> None:
        self.sent.append(path)

    def exchange(self, message: str | bytes) -> bytes:
        self.sent.append(message)
        return self.answers.pop(0)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        self.sent.append(f"close after {kind}")


def scripted(*answers: bytes) -> tuple[DecodeStream, ScriptedSocket]:
    """Return a stream with one row at offset 5, not open yet, and its socket."""
    socket: Any = ScriptedSocket(*answers)
    return DecodeStream(socket, "m", None, dict(FIELDS), retries=1, resume=False), socket


def opened(*answers: bytes, **document: Any) -> tuple[DecodeStream, ScriptedSocket]:
    """Return an open stream, and its socket."""
    stream, socket = scripted(json.dumps(OPENED | document).encode(), *answers)
    stream.__enter__()
    assert socket.sent == ["/models/m/decode", json.dumps({"open": FIELDS})]
    socket.sent.clear()
    return stream, socket


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b'{"closing":"idle","next_offset":[5]}',
        b'{"next_offset":[6],"shape":[1,1,1],"dtype":"float32","embeddings":"AAAAAA==","step":2}',
        b"{",
        HEADER.pack(b"INCQ", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0") + ONE,
        HEADER.pack(b"PRBK", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0") + ONE,
        HEADER.pack(b"PRBK", 2, 4, 0, 1, 1, 1, 1, b"\1\0\0") + ONE,
        HEADER.pack(b"PRBK", 2, 2, 16, 1, 1, 1, 1, b"\1\0\0") + ONE,
        HEADER.pack(b"PRBK", 2, 2, 0, 2, 1, 1, 1, b"\1\0\0") + ONE,
        HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 6),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIIff", 6, 1, 1, 0.5, 1),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 9, b"\1\0\0") + ONE,
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


@pytest.mark.parametrize("message", [b"", b"\xff", b"[]", b"{}"])
def test_opening_with_invalid_response_raises_error(message: bytes) -> None:
    stream, socket = scripted(message, message)
    with pytest.raises(errors.ConnectionFailed, match="the server opened no decode stream") as raised:
        stream.__enter__()
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


def test_input_without_a_flag_is_sent_as_json() -> None:
    names = [f"input{number}" for number in range(9)]  # a frame has eight flags
    answer = b'{"next_offset":[6],"shape":[1,1,1],"dtype":"float32","use_as":"","embeddings":"AAAAPw==","step":1}'
    stream, socket = opened(answer, indices=names)
    assert stream.step([7], indices={names[-1]: [1]}).tolist() == [[[0.5]]]
    assert json.loads(socket.sent[-1]) == {"input_ids": [[7]], names[-1]: [[1]], "step": 1, "offset": [5]}


@pytest.mark.parametrize(
    ("stated", "least"),
    [
        (b',"retry_after":2', 2),
        (b"", None),
        (b',"retry_after":null', None),
        (b',"retry_after":"soon"', None),
        (b',"retry_after":31', None),
    ],
)
def test_busy_stream_repeats_message_after_stated_pause(stated: bytes, least: int | None) -> None:
    """The message gets a new number."""
    busy = HEADER.pack(b"PRBK", 2, 3, 0, 1, 0, 0, 0, bytes(3))
    busy += b'{"type":"urn:preblock:error:Unavailable","status":503,"detail":"full"' + stated + b"}"
    stream, socket = opened(busy, HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 4))
    if least is None:
        with raises_kind("Unavailable"):
            stream.rewind(4)
        assert socket.pauses == []
        return
    stream.rewind(4)
    assert [HEADER.unpack_from(frame)[4] for frame in socket.sent] == [1, 2]
    (seconds,) = socket.pauses
    assert least <= seconds <= least + 0.25
    assert stream.offset == [4]
