"""WebSocket frames that are endless, invalid, or late."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.reliability.connections.hostile import pour, unharmed
from tests.reliability.wires import UPGRADE, connection, frame, received, request, status, web_socket
from tests.support.connections import dial
from tests.support.servers import Server, live_server


@pytest.mark.parametrize("piece", [b"", b"x"])
def test_endless_websocket_fragments_use_bounded_memory(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, piece: bytes
) -> None:
    with unharmed(hostile_server, hostile_http, good_answer), web_socket(hostile_server) as stream:
        stream.sendall(frame(1, b'{"ping"', fin=False))
        pour(stream, frame(0, piece, fin=False) * 1000, 3 * 2**20, seconds=3)


def test_message_of_many_fragments_is_accepted(hostile_server: Server) -> None:
    with web_socket(hostile_server) as stream:
        text = json.dumps({"input_ids": [1, 2]}).encode()
        stream.sendall(frame(1, text[:1], fin=False))
        for index in range(1, len(text)):
            stream.sendall(frame(0, text[index : index + 1], fin=False) + frame(0, b"", fin=False) + frame(9, b""))
        stream.sendall(frame(0, b""))
        answer = b""
        while b"next_offset" not in answer:
            answer += stream.recv(2**16)
        assert b'"next_offset":[2]' in answer


LIES = {
    "2^62-bytes": (b"\x82\xff" + (2**62).to_bytes(8, "big"), 1009),
    "2^63-bytes": (b"\x82\xff" + (2**63).to_bytes(8, "big"), 1009),
    "no-mask": (b"\x82\x02{}", 1002),
    "an-opcode": (frame(3, b""), 1002),
    "a-flag": (b"\xc1\x80" + bytes(4), 1002),
    "a-long-ping": (frame(9, bytes(126)), 1002),
    "a-fragment-of-nothing": (frame(0, b"x"), 1002),
    "no-utf-8": (frame(1, b"\xff"), 1007),
    "half-a-code": (frame(8, b"\x03"), 1002),
    "a-code": (frame(8, b"\x00\x05"), 1002),
}


@pytest.mark.parametrize("name", LIES)
def test_invalid_websocket_frame_closes_stream(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, name: str
) -> None:
    sent, code = LIES[name]
    with unharmed(hostile_server, hostile_http, good_answer), web_socket(hostile_server) as stream:
        stream.sendall(sent)
        answer = received(stream)
        assert (answer[0], int.from_bytes(answer[2:4], "big")) == (0x88, code)


CLOSED = frame(8, (1000).to_bytes(2, "big"))


@pytest.mark.parametrize(
    ("behind", "expected_status"),
    [(b"\x00garbage\r\n\r\n", 400), (b"GET / HT\x00TP\r\n\r\n", 400), (UPGRADE + CLOSED, 101)],
)
def test_error_is_not_written_into_another_response(
    hostile_server: Server, tiny_tables: dict[str, NDArray[np.float32]], behind: bytes, expected_status: int
) -> None:
    rows = 8000
    body = json.dumps({"input_ids": [[1, 2, 3, 4, 5, 6]] * rows}).encode()
    with connection(hostile_server) as stream:
        stream.sendall(request("/models/gpt/embed", body, "Accept: application/octet-stream") + behind)
        answer = received(stream)
    head, _, rest = answer.partition(b"\r\n\r\n")
    content = (tiny_tables["tokens"][[1, 2, 3, 4, 5, 6]] + tiny_tables["positions"][:6]).tobytes() * rows
    assert status(head) == 200
    assert rest.startswith(content)
    assert status(rest.removeprefix(content)) == expected_status


def test_missing_pongs_do_not_end_an_idle_stream(tiny_repository: Path) -> None:
    """The client answers no ping until the idle limit. A limit of pings would be as long as their interval."""
    settings = Settings(repository=tiny_repository, stream_idle_timeout_seconds=1)
    config = configure(settings, create_app(settings))
    assert config.ws_ping_timeout is None
    config.ws_ping_interval = 0.1
    with live_server(config) as port, dial(f"http://127.0.0.1:{port}") as stream:
        stream.sendall(UPGRADE + frame(1, b'{"input_ids": [1]}'))
        received = b""
        while received.count(b'"closing":"idle"') < 2:  # the message, and the reason of the close frame
            received += stream.recv(2**16)
    assert received.count(b"\x89\x04") > 3
    message, _, close = received.rpartition(b"\x88")
    assert b'{"closing":"idle","next_offset":[1]}' in message
    assert int.from_bytes(close[1:3], "big") == 1008
