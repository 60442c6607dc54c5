"""Heads without end, of any size, slow, incomplete, or of a broken handshake."""

import time
from contextlib import ExitStack

import httpx
import pytest

from tests.reliability.connections.hostile import chunked, pour, unharmed
from tests.reliability.wires import UPGRADE, connection, received, request, status
from tests.support.servers import Server

HEADS = {
    "a-header": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"a" * 2**20),
    "many-headers": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 2**17),
    "an-address": (b"GET /", b"a" * 2**20),
    "trailers": (chunked(b"1\r\n{\r\n0\r\n"), b"a: b\r\n" * 2**17),
    "a-trailer": (chunked(b"1\r\n{\r\n0\r\nX-Long: "), b"a" * 2**20),
    "an-extension": (chunked(b"1;"), b"a" * 2**20),
}


@pytest.mark.parametrize("name", HEADS)
def test_endless_header_block_is_rejected(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, name: str
) -> None:
    begin, again = HEADS[name]
    with unharmed(hostile_server, hostile_http, good_answer), connection(hostile_server) as stream:
        stream.sendall(begin)
        answer = pour(stream, again, 100 * 2**20)
    assert status(answer) == 431
    assert answer.endswith(b"\r\n\r\nthe headers have more than 65536 bytes, the limit")


@pytest.mark.parametrize(("size", "expected_status"), [(65_500, 200), (65_600, 431)])
@pytest.mark.parametrize("parts", [1, 7])
def test_header_limit_holds_for_any_chunking(
    hostile_server: Server, size: int, expected_status: int, parts: int
) -> None:
    begin = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: "
    whole = begin.ljust(size, b"a") + b"\r\n\r\n"
    with connection(hostile_server) as stream:
        for part in range(parts):
            stream.sendall(whole[part * len(whole) // parts : (part + 1) * len(whole) // parts])
            time.sleep(0.02)
        assert status(received(stream)) == expected_status


def test_slow_headers_and_bodies_do_not_delay_other_clients(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, long: bool
) -> None:
    """Oracle: all of them are complete in the end, and get the right bits."""
    whole = request("/models/gpt/embed", None, "Accept: application/octet-stream", "Connection: close")
    count = 500 if long else 100
    with unharmed(hostile_server, hostile_http, good_answer), ExitStack() as stack:
        heads = [stack.enter_context(connection(hostile_server)) for _ in range(count)]
        bodies = [stack.enter_context(connection(hostile_server)) for _ in range(count)]
        for stream in bodies:
            stream.sendall(whole[:-20])
        for index in range(20):
            for stream in heads:
                stream.sendall(whole[index : index + 1])
            for stream in bodies:
                stream.sendall(whole[len(whole) - 20 + index :][:1])
        for stream in heads:
            stream.sendall(whole[20:])
        for stream in (*heads, *bodies):
            answer = received(stream)
            assert status(answer) == 200
            assert answer.endswith(b"\r\n\r\n" + good_answer)


def test_incomplete_pipelined_head_times_out(hostile_server: Server) -> None:
    with connection(hostile_server) as stream:
        stream.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
        assert status(stream.recv(2**16)) == 200
        assert status(received(stream)) == 408


def test_missing_head_times_out(hostile_server: Server) -> None:
    with connection(hostile_server) as silent, connection(hostile_server) as half, connection(hostile_server) as second:
        half.sendall(b"GET /livez HT")
        second.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(second.recv(2**16)) == 200
        second.sendall(b"GET")
        begin = time.monotonic()
        for stream in (silent, half, second):
            answer = received(stream)
            assert status(answer) == 408
            assert answer.endswith(b"\r\n\r\nthe request did not arrive in time")
        assert 1.5 < time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("change", "expected_status"),
    [
        pytest.param((b"\r\n\r\n", b"\r\n" + b"a: b\r\n" * 200 + b"\r\n"), 431, id="200-headers"),
        pytest.param((b"\r\n\r\n", b"\r\na: " + b"b" * 9000 + b"\r\n\r\n"), 431, id="long-header"),
        pytest.param((b"decode", b"decode?" + b"a" * 9000), 414, id="long-address"),
        pytest.param((b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n{}"), 400, id="body"),
        pytest.param((b"GET", b"POST"), 405, id="post"),
        pytest.param((b"13", b"12"), 426, id="version"),
        pytest.param((b"A==", b"A"), 400, id="key"),
    ],
)
def test_invalid_handshake_gets_http_error(
    hostile_server: Server, change: tuple[bytes, bytes], expected_status: int
) -> None:
    with connection(hostile_server) as stream:
        stream.sendall(UPGRADE.replace(*change))
        assert status(received(stream)) == expected_status
