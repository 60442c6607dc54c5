"""Connections that are endless, wrong, slow, reset or half closed: they harm nobody else, and leave no memory.

h2 sends the keepalive pings of gRPC (RFC 9113, section 6.7).
"""

import json
import re
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event, PingAckReceived
from tritonclient.grpc import service_pb2

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.reliability.load import asking_meanwhile
from tests.reliability.wires import (
    UPGRADE,
    connection,
    frame,
    memory,
    received,
    request,
    status,
    still_right,
    web_socket,
)
from tests.support.artifacts import Floats
from tests.support.connections import RawConnection, dial, http_request
from tests.support.open_inference import open_stub
from tests.support.scrapes import wait_for_streams
from tests.support.servers import Server, live_server, serve
from tests.support.tls import TlsFiles
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def hostile_server(tiny_repository: Path) -> Iterator[Server]:
    """Serve with memory of its own and a header timeout of two seconds."""
    with serve(tiny_repository, PREBLOCK_HEADER_TIMEOUT_SECONDS="2") as running:
        yield running


@pytest.fixture(scope="module")
def hostile_http(hostile_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hostile_server.address, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        yield client


Unharmed = Callable[[], AbstractContextManager[None]]
MOST = 24 * 2**20
"""Limit of the server's memory growth for a client with ten times as many bytes, in bytes."""


@pytest.fixture
def unharmed(hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes) -> Unharmed:
    """Return a function to check the answers to others during and after a block, and the growth of the server."""

    @contextmanager
    def check() -> Iterator[None]:
        still_right(hostile_http, good_answer)
        before = memory(hostile_server.pid)
        with asking_meanwhile(hostile_server, good_answer):
            yield
            grown = memory(hostile_server.pid) - before
        assert grown < MOST
        still_right(hostile_http, good_answer)

    return check


def pour(stream: socket.socket, content: bytes, most: int, seconds: float = 2) -> bytes:
    """Send the same again and again until it is not taken, and return the answer."""
    begin, sent = time.monotonic(), 0
    with suppress(ConnectionError, TimeoutError):
        stream.settimeout(1)
        while sent < most and time.monotonic() - begin < seconds:
            stream.sendall(content)
            sent += len(content)
    answer = b""
    with suppress(ConnectionError, TimeoutError):
        answer = stream.recv(2**16)
    return answer


def chunked(body: bytes) -> bytes:
    return request("/models/gpt/embed", body, "Transfer-Encoding: chunked")


HEADS = {
    "a-header": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ", b"a" * 2**20),
    "many-headers": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 2**17),
    "an-address": (b"GET /", b"a" * 2**20),
    "trailers": (chunked(b"1\r\n{\r\n0\r\n"), b"a: b\r\n" * 2**17),
    "a-trailer": (chunked(b"1\r\n{\r\n0\r\nX-Long: "), b"a" * 2**20),
    "an-extension": (chunked(b"1;"), b"a" * 2**20),
}


def test_endless_header_block_is_rejected(hostile_server: Server, unharmed: Unharmed) -> None:
    for name, (begin, again) in HEADS.items():
        with unharmed(), connection(hostile_server) as stream:
            stream.sendall(begin)
            answer = pour(stream, again, 100 * 2**20)
        assert status(answer) == 431, name
        assert answer.endswith(b"\r\n\r\nthe headers have more than 65536 bytes, the limit")


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


def test_invalid_handshake_gets_http_error(hostile_server: Server) -> None:
    end = b"\r\n\r\n"
    for old, new, expected_status in (
        (end, b"\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (end, b"\r\na: " + b"b" * 9000 + end, 431),
        (b"decode", b"decode?" + b"a" * 9000, 414),
        (end, b"\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET", b"POST", 405),
        (b"13", b"12", 426),
        (b"A==", b"A", 400),
    ):
        with connection(hostile_server) as stream:
            stream.sendall(UPGRADE.replace(old, new))
            assert status(received(stream)) == expected_status, new[:30]


def test_endless_websocket_fragments_use_bounded_memory(hostile_server: Server, unharmed: Unharmed) -> None:
    for piece in (b"", b"x"):
        with unharmed(), web_socket(hostile_server) as stream:
            stream.sendall(frame(1, b'{"ping"', fin=False))
            pour(stream, frame(0, piece, fin=False) * 1000, 3 * 2**20, seconds=3)


def test_error_is_not_written_into_another_response(hostile_server: Server, tiny_tables: dict[str, Floats]) -> None:
    rows = 8000
    body = json.dumps({"input_ids": [[1, 2, 3, 4, 5, 6]] * rows}).encode()
    content = (tiny_tables["tokens"][[1, 2, 3, 4, 5, 6]] + tiny_tables["positions"][:6]).tobytes() * rows
    closed = UPGRADE + frame(8, (1000).to_bytes(2, "big"))
    for behind, expected_status in ((b"\x00garbage\r\n\r\n", 400), (b"GET / HT\x00TP\r\n\r\n", 400), (closed, 101)):
        with connection(hostile_server) as stream:
            stream.sendall(request("/models/gpt/embed", body, "Accept: application/octet-stream") + behind)
            head, _, rest = received(stream).partition(b"\r\n\r\n")
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


def test_nonreading_client_is_throttled(hostile_server: Server, unharmed: Unharmed) -> None:
    for begin, again in (
        (b"", request() * 200),
        (UPGRADE, frame(9, b"x" * 125) * 500),
        (UPGRADE, frame(1, b'{"ping": true}') * 500),
    ):
        with unharmed(), connection(hostile_server) as stream:
            stream.sendall(begin)
            pour(stream, again, 2**30, seconds=4)


def test_half_closed_connection_is_closed(hostile_server: Server, hostile_http: httpx.Client) -> None:
    for begin in (b"", request()[:40], request()[:-5], UPGRADE, request() + b"POST"):
        with connection(hostile_server) as stream:
            stream.sendall(begin)
            stream.shutdown(socket.SHUT_WR)
            received(stream)
    wait_for_streams(hostile_http, 0)


CHUNKED = "Transfer-Encoding: chunked"


def test_wrong_body_length_is_rejected_or_awaited(hostile_server: Server, unharmed: Unharmed) -> None:
    """Without a status, the server waits for more until the client closes its side."""
    lengths = ("2, 2", "-2", "+2", "0x2", str(10**25))
    cases: list[tuple[bytes, list[str], list[int]]] = [
        (b"{}xx", ["Content-Length: 2"], [422, 400]),
        (b"{}", ["Content-Length: 9"], []),
        *((b"{}", [f"Content-Length: {length}"], [400]) for length in lengths),
        (b"{}", ["Content-Length: 2", "Content-Length: 2"], [400]),
        (b"{}", ["Content-Length: 2", CHUNKED], [400]),
        (b"", [f"Content-Length: {10**15}"], [413]),
        (b"2\r\n{}", [CHUNKED], []),
        (b"9\r\n{}\r\n0\r\n\r\n", [CHUNKED], []),
        *((chunk, [CHUNKED], [400]) for chunk in (b"1\r\n{}\r\n", b"-1\r\n{}\r\n", b"f" * 17 + b"\r\n", b"zz\r\n")),
    ]
    with unharmed():
        for body, headers, statuses in cases:
            with connection(hostile_server) as stream:
                stream.sendall(request("/models/gpt/embed", body, *headers))
                stream.shutdown(socket.SHUT_WR)
                found = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", received(stream))]
                assert found == statuses, (body, headers)


def test_server_answers_beside_many_open_connections(
    tiny_repository: Path, good_answer: bytes, long: bool, record_property: Callable[[str, object], None]
) -> None:
    """Half of them have sent half a request. In the end all are answered."""
    # This process and the server have other descriptors too.
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) if long else 300
    head = http_request("/livez", headers={"Connection": "close"}, method="GET")[:-2]
    with serve(tiny_repository) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        still_right(client, good_answer)
        before = memory(server.pid)
        with ExitStack() as stack:
            streams = [stack.enter_context(connection(server, 60)) for _ in range(count)]
            for stream in streams[1::2]:
                stream.sendall(head)
            end, served = time.monotonic() + (60 if long else 1), 0
            while time.monotonic() < end:
                still_right(client, good_answer)
                served += 1
            grown = memory(server.pid) - before
            for index, stream in enumerate(streams):
                stream.sendall(b"\r\n" if index % 2 else head + b"\r\n")
            assert [stream.recv(12) for stream in streams] == [b"HTTP/1.1 200"] * count
    assert grown < 2**14 * count + MOST
    record_property("seen", {"held": count, "bytes each": grown // count, "served beside": served})


def test_non_grpc_bytes_do_not_affect_other_clients(hostile_server: Server, unharmed: Unharmed) -> None:
    random = np.random.default_rng(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = hostile_server.grpc.rpartition(":")
    settings = bytes(3) + b"\x04\x00" + bytes(4)
    with unharmed():
        for index in range(60):
            kind, length = int(random.integers(0, 12)), int(random.integers(0, 2**24))
            lie = length.to_bytes(3, "big") + bytes([kind, int(random.integers(0, 256))]) + random.bytes(4)
            sent = (b"", preface, preface + settings)[index % 3] + (lie + random.bytes(200)) * (1 + index % 5)
            with socket.create_connection((host, int(port)), 20) as stream, suppress(ConnectionError):
                stream.sendall(sent)
                stream.shutdown(socket.SHUT_WR)
                received(stream)
        with open_stub(hostile_server.grpc) as stub:
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready


MOST_KEPT = 20 * 2**20
BODY = b'{"input_ids": [1]}'


def long_request(kind: str, size: int, number: int = 0) -> bytes:
    path, body = ("/models/gpt/embed", BODY) if kind == "POST" else ("/models", b"")
    return http_request(path, body, {"X-Long": f"{number:08d}" * (size // 8)}, kind)


def warm(server: Server) -> int:
    """Ask for once, and return the memory of the server."""
    with RawConnection(server.address) as client:
        for kind in ("GET", "POST"):
            assert client.ask(long_request(kind, 8))[0] == 200
    return memory(server.pid)


def test_prepared_requests_of_long_heads_use_bounded_memory(tiny_repository: Path) -> None:
    with serve(tiny_repository) as server:
        before = warm(server)
        with RawConnection(server.address) as client:
            for number in range(600):
                assert client.ask(long_request("POST", 60_000, number))[0] == 200
        assert memory(server.pid) - before < MOST_KEPT


@pytest.mark.parametrize(("kind", "size"), [("GET", 60_000), ("POST", 14_000), ("POST", 60_000)])
def test_idle_connection_keeps_no_long_head(tiny_repository: Path, kind: str, size: int) -> None:
    with serve(tiny_repository) as server, ExitStack() as stack:
        before = warm(server)
        for _ in range(400):
            client = stack.enter_context(RawConnection(server.address))
            for _ in range(2):
                assert client.ask(long_request(kind, size))[0] == 200
        assert memory(server.pid) - before < 400 * 2**14 + MOST_KEPT // 4


@pytest.mark.parametrize("kind", ["GET", "POST"])
def test_reset_connection_leaves_no_memory_in_use(tiny_repository: Path, kind: str) -> None:
    with serve(tiny_repository) as server:
        before = warm(server)
        for _ in range(3000):
            with RawConnection(server.address) as client:
                assert client.ask(long_request(kind, 8000))[0] == 200
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: memory(server.pid) - before < MOST_KEPT, 5)


def test_half_handshakes_leave_no_memory(tiny_repository: Path, tmp_path: Path) -> None:
    with serve(tiny_repository, *TlsFiles(tmp_path).options) as server:
        before = memory(server.pid)
        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(800):
                    stack.enter_context(dial(server.address)).sendall(b"\x16\x03\x01\x02\x00")
                time.sleep(0.5)
        wait_until(lambda: memory(server.pid) - before < MOST_KEPT, 60)


def test_pings_of_idle_connection_are_answered(tiny_server: Server) -> None:
    """By default, gRPC takes a ping within five minutes for an early one, and ends the connection at the third."""
    client = H2Connection()
    client.initiate_connection()
    with dial(f"http://{tiny_server.grpc}", 10) as stream:
        for pause in (0, 0, 0, 5.2, 5.2):  # gRPC forgives two early pings
            time.sleep(pause)
            client.ping(bytes(8))
            stream.sendall(client.data_to_send())
            found: list[Event] = []
            while not any(isinstance(event, PingAckReceived | ConnectionTerminated) for event in found):
                found += client.receive_data(stream.recv(2**16))
            assert not any(isinstance(event, ConnectionTerminated) for event in found)
