"""Long frames, split before `websockets` reads them. Oracle: `websockets`, with the same input in one piece."""

import random
import struct

import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from preblock.service.server.websocket_frames import MAX_FRAGMENT_BYTES, FrameReader

MAX_BYTES = 10 * MAX_FRAGMENT_BYTES
LENGTHS = [0, 1, 125, 126, 65535, 65536, 65537, 65539, 131072, 200_001, MAX_BYTES // 4]


def frame(first: int, payload: bytes, masked: bool = True, declared: int | None = None) -> bytes:
    """Return a frame of a client; `declared` is a wrong length."""
    size = len(payload) if declared is None else declared
    code = size if size < 126 else 126 if size < 65536 else 127
    length = struct.pack("!H", size) if code == 126 else struct.pack("!Q", size) if code == 127 else b""
    mask = random.randbytes(4)
    covered = int.from_bytes(payload, "big") ^ int.from_bytes((mask * (len(payload) // 4 + 1))[: len(payload)], "big")
    if not masked:
        return bytes((first, code)) + length + payload
    return bytes((first, 128 + code)) + length + mask + covered.to_bytes(len(payload), "big")


def messages(protocol: ServerProtocol) -> list[tuple[Opcode, bytes]]:
    """Return the events so far, with fragments joined."""
    found: list[tuple[Opcode, bytes]] = []
    control: list[tuple[Opcode, bytes]] = []
    complete = True
    for event in protocol.events_received():
        assert isinstance(event, Frame)
        data = bytes(event.data)
        if event.opcode >= Opcode.CLOSE:
            control.append((event.opcode, data))
        elif complete:
            found.append((event.opcode, data))
            complete = event.fin
        else:
            found[-1] = found[-1][0], found[-1][1] + data
            complete = event.fin
    return found + control


def read(parts: list[bytes], reader: FrameReader | None) -> tuple[ServerProtocol, list[tuple[Opcode, bytes]], int]:
    """Return the protocol after `parts`, its messages, and the length of its longest frame."""
    protocol, longest = ServerProtocol(state=State.OPEN, max_size=MAX_BYTES), 0
    for part in parts:
        protocol.receive_data(part if reader is None else reader.feed(part))
    seen = list(protocol.events)
    assert not any(isinstance(event, Request) for event in seen)
    longest = max((len(event.data) for event in seen if isinstance(event, Frame)), default=0)
    return protocol, messages(protocol), longest


def cut(data: bytes, draw: random.Random, most: int) -> list[bytes]:
    parts, begin = [], 0
    while begin < len(data):
        end = begin + draw.randint(1, most)
        parts.append(data[begin:end])
        begin = end
    return parts


@pytest.mark.parametrize("most", [60, 5000, 16384, 10**6])
@pytest.mark.parametrize("seed", range(2))
def test_long_frames_split_into_the_same_messages(seed: int, most: int) -> None:
    draw, data = random.Random(seed), b""
    for length in draw.sample(LENGTHS, len(LENGTHS) if most > 60 else 4):
        kind, count = draw.choice((Opcode.TEXT, Opcode.BINARY)), draw.randint(1, 3)
        for index in range(count):
            opcode = Opcode.CONT if index else kind
            data += frame((128 if index == count - 1 else 0) + opcode, draw.randbytes(length))
            data += frame(128 + Opcode.PING, b"ping") * draw.randint(0, 1)
    reader = FrameReader(MAX_BYTES)
    _, expected, _ = read([data], None)
    protocol, found, longest = read(cut(data, draw, most), reader)
    assert found == expected
    assert protocol.state is State.OPEN
    assert reader.between_messages
    assert reader.received == 0
    assert longest <= MAX_FRAGMENT_BYTES + most


WRONG = {
    "unmasked": frame(0x82, b"abc", masked=False),
    "unmasked and long": frame(0x82, bytes(70_000), masked=False),
    "reserved opcode": frame(0x83, b""),
    "reserved bit": frame(0xC2, bytes(70_000)),
    "continuation first": frame(0x80, bytes(70_000)),
    "long control frame": frame(0x89, bytes(70_000)),
    "over the limit": frame(0x82, b"", declared=MAX_BYTES + 1),
    "fragments over the limit": frame(0x02, bytes(MAX_BYTES)) + frame(0x80, bytes(70_000)),
    "largest length": frame(0x82, b"", declared=2**64 - 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_frame_closes_with_the_same_code(name: str) -> None:
    expected, _, _ = read([WRONG[name]], None)
    protocol, _, _ = read(cut(WRONG[name], random.Random(1), 16384), FrameReader(MAX_BYTES))
    assert expected.close_sent is not None
    assert protocol.close_sent is not None
    assert protocol.close_sent.code == expected.close_sent.code


@pytest.mark.parametrize(("name", "size"), [("unmasked", 2), ("over the limit", 10), ("largest length", 10)])
def test_wrong_head_is_refused_before_its_end(name: str, size: int) -> None:
    """The client may wait for the refusal before its next byte."""
    for part in (size - 1, size):
        protocol, _, _ = read([WRONG[name][:part]], FrameReader(MAX_BYTES))
        assert (protocol.close_sent is not None) == (part == size)
