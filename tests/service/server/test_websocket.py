"""Plain steps, answered in the connection of a WebSocket, in any parts and between any other messages; long frames.

Oracles: the rows of the native API, and `websockets`, which reads the same frames of clients in one piece.
"""

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from preblock.service.core.large_bodies import LARGE_BODY_BYTES, IncomingMemory
from preblock.service.server.websocket import MessageMemory
from preblock.service.server.websocket_frames import MAX_FRAGMENT_BYTES, FrameReader
from tests.support.connections import UPGRADE, dial, http_request
from tests.support.decode_protocols import FRAME
from tests.support.engines import live_settings
from tests.support.loops import in_loop
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server

MODEL, WIDTH = "gpt2-small", 768


def step(ids: list[list[int]], number: int = 0, stated: list[int] | None = None) -> bytes:
    values, lengths = [value for row in ids for value in row], [len(row) for row in ids]
    header = FRAME.pack(b"PRBK", 2, 1, 4 if stated else 0, number, len(ids), len(values), 0, bytes(3))
    offsets = b"" if stated is None else np.array(stated).tobytes()
    return header + np.array(values).tobytes() + offsets + np.array(lengths, np.uint32).tobytes()


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


class RawWebSocket:
    """A WebSocket for any bytes, and the frames that the server sends (RFC 6455, section 5.2)."""

    def __init__(self, stream: socket.socket, path: str) -> None:
        self.stream, self.file = stream, stream.makefile("rb")
        self.pongs: list[bytes] = []
        self.send(http_request(path, headers=UPGRADE, method="GET"))
        assert self.file.readline().startswith(b"HTTP/1.1 101 ")
        while self.file.readline() != b"\r\n":
            pass

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.stream.sendall(part)

    def recv(self) -> tuple[Opcode, bytes]:
        """Return the next frame except pongs; these may overtake others (section 5.4)."""
        while True:
            first, size = self.file.read(2)
            assert not first & 0x70
            if size > 125:
                size, shortest = int.from_bytes(self.file.read(2 if size == 126 else 8)), size == 126
                assert (125 < size < 2**16) == shortest
            opcode, data = Opcode(first & 15), self.file.read(size)
            if opcode is not Opcode.PONG:
                return opcode, data
            self.pongs.append(data)

    def vectors(self, shape: tuple[int, int]) -> tuple[list[int], bytes]:
        """Return the offsets and the vectors of an answer."""
        _, frame = self.recv()
        rows, tokens = FRAME.unpack_from(frame)[5:7]
        assert (rows, tokens) == (shape[0], shape[0] * shape[1])
        assert frame[5] == 2, frame
        offsets = np.frombuffer(frame, np.int64, rows, FRAME.size).tolist()
        return offsets, frame[-4 * tokens * WIDTH :]


@contextmanager
def opened(server: Server, path: str = f"/models/{MODEL}/decode") -> Iterator[RawWebSocket]:
    with dial(server.address) as stream:
        yield RawWebSocket(stream, path)


def expected(clients: Clients, ids: list[list[int]], offset: list[int]) -> bytes:
    return native_bytes(clients, MODEL, {"input_ids": ids, "offset": offset}).tobytes()


def test_steps_in_any_segmentation_are_answered_in_order(model_server: Server, model_clients: Clients) -> None:
    ids = [[[5]], [[6]], [[7, 8]], [[9]], [[10]]]
    frames = [frame(0x82, step(row, number + 1)) for number, row in enumerate(ids)]
    whole = b"".join(frames)
    for parts in (
        frames,
        [whole],
        [whole[index : index + 1] for index in range(len(whole))],
        [whole[:50], whole[50:75], whole[75:]],
        [frames[0] + frames[1][:20], frames[1][20:] + b"".join(frames[2:])],
    ):
        with opened(model_server, f"/models/{MODEL}/decode?offset=3") as raw:
            raw.send(*parts)
            offset = 3
            for row in ids:
                offsets, vectors = raw.vectors((1, len(row[0])))
                assert vectors == expected(model_clients, row, [offset])
                offset += len(row[0])
                assert offsets == [offset]


def test_mixed_messages_are_answered_in_order(model_server: Server, model_clients: Clients) -> None:
    plain, parted = frame(0x82, step([[5]])), step([[7]])
    with opened(model_server) as raw:
        raw.send(plain + frame(0x81, b'{"input_ids": [6]}') + frame(0x89, b"hello") + plain[:2])  # a ping
        raw.send(plain[2:] + frame(0x02, parted[:10]) + frame(0x80, parted[10:]), frame(0x82, step([[50257]])) + plain)
        assert raw.vectors((1, 1)) == ([1], expected(model_clients, [[5]], [0]))
        opcode, text = raw.recv()
        assert (opcode, raw.pongs) == (Opcode.TEXT, [b"hello"])
        assert b'"next_offset":[2]' in text
        assert raw.vectors((1, 1)) == ([3], expected(model_clients, [[5]], [2]))
        assert raw.vectors((1, 1)) == ([4], expected(model_clients, [[7]], [3]))
        _, error = raw.recv()
        assert (error[5], b"50257" in error) == (3, True)
        assert raw.vectors((1, 1)) == ([5], expected(model_clients, [[5]], [4]))


def test_malformed_frame_ends_only_its_own_connection(model_server: Server, model_clients: Clients) -> None:
    plain = frame(0x82, step([[5]]))
    for sent in (
        *(b"\x82\x24" + step([[5]]), b"\xc2" + plain[1:]),  # not masked, and with a bit without a meaning
        b"\x82\xff" + (2**62).to_bytes(8, "big") + bytes(4),  # too long
        *(frame(0x81, b"\xff"), frame(0x88, b"\x03"), frame(0x80, b"x")),  # no UTF-8, half a code, a part of nothing
    ):
        with opened(model_server) as raw, opened(model_server) as other:
            raw.send(plain)
            raw.vectors((1, 1))
            raw.send(sent)
            assert raw.recv()[0] is Opcode.CLOSE
            other.send(plain)
            assert other.vectors((1, 1)) == ([1], expected(model_clients, [[5]], [0]))


@pytest.mark.parametrize("tokens", [1, 5, 6])
def test_step_answer_of_any_size_has_the_shortest_length(tiny_server: Server, tokens: int) -> None:
    """The length of an answer to five tokens fits into seven bits, and to six tokens it does not."""
    with opened(tiny_server, "/models/gpt/decode") as raw:
        raw.send(frame(0x82, step([[5] * tokens])))
        _, answer = raw.recv()
    assert (answer[5], FRAME.unpack_from(answer)[6]) == (2, tokens)
    assert (len(answer) < 126) == (tokens < 6)


MAX_BYTES = 10 * MAX_FRAGMENT_BYTES
LENGTHS = [0, 1, 125, 126, 65535, 65536, 65537, 65539, 131072, 200_001, MAX_BYTES // 4]


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


@in_loop
async def test_large_message_holds_memory_until_its_answer() -> None:
    """While it does, the connection is not read. An application that has ended takes and answers nothing."""

    async def next_message() -> dict[str, str]:
        return {"type": "websocket.receive"}

    messages = MessageMemory(IncomingMemory(live_settings(), lambda _: None), lambda: None, lambda: None)
    for small_before in range(2):
        messages.count(LARGE_BODY_BYTES, queued=small_before)
        messages.count(0, queued=small_before + 1)
        for _ in range(small_before):
            await messages.receive(next_message)
            messages.answer()
        await messages.receive(next_message)
        assert messages.paused
        messages.answer()
        assert not messages.paused
    messages.count(LARGE_BODY_BYTES, queued=0)
    messages.count(0, queued=0)
    assert not messages.paused
