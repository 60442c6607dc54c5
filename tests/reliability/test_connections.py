"""Connections of slow, deaf, broken and greedy clients: real sockets, a real server."""

import json
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

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
from tests.support.paths import ROOT
from tests.support.scrapes import wait_for_streams
from tests.support.servers import Server, serve

MOST = 24 * 2**20
"""Limit of the server's memory growth for a client with ten times as many bytes, in bytes."""


@pytest.fixture(scope="module")
def server(tiny_repository: Path) -> Iterator[Server]:
    """Serve with memory of its own and a header timeout of two seconds."""
    with serve(tiny_repository, PREBLOCK_HEADER_TIMEOUT_SECONDS="2") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        yield client


@contextmanager
def unharmed(server: Server, http: httpx.Client, expected: bytes) -> Iterator[None]:
    """Check the answers to others during and after a block, and the growth of the server."""
    still_right(http, expected)
    before = memory(server.process.pid)
    over = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            with httpx.Client(base_url=server.address, timeout=60) as other:
                while not over.wait(0.05):
                    still_right(other, expected)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
        grown = memory(server.process.pid) - before
    finally:
        over.set()
        asking.join()
    assert not failed, failed
    assert grown < MOST
    still_right(http, expected)


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
    "a-header": (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a" * 2**20),
    "many-headers": (b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n" * 2**17),
    "an-address": (b"GET /", b"a" * 2**20),
    "trailers": (chunked(b"1\r\n{\r\n0\r\n"), b"a: b\r\n" * 2**17),
    "a-trailer": (chunked(b"1\r\n{\r\n0\r\nX-Long: "), b"a" * 2**20),
    "an-extension": (chunked(b"1;"), b"a" * 2**20),
}


@pytest.mark.parametrize("name", HEADS)
def test_endless_header_block_is_rejected(server: Server, http: httpx.Client, expected: bytes, name: str) -> None:
    begin, again = HEADS[name]
    with unharmed(server, http, expected), connection(server) as stream:
        stream.sendall(begin)
        answer = pour(stream, again, 100 * 2**20)
    assert status(answer) == 431
    assert answer.endswith(b"\r\n\r\nthe headers have more than 65536 bytes, the limit")


@pytest.mark.parametrize(("size", "expected_status"), [(65_500, 200), (65_600, 431)])
@pytest.mark.parametrize("parts", [1, 7])
def test_header_limit_holds_for_any_chunking(server: Server, size: int, expected_status: int, parts: int) -> None:
    begin = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: "
    whole = begin.ljust(size, b"a") + b"\r\n\r\n"
    with connection(server) as stream:
        for part in range(parts):
            stream.sendall(whole[part * len(whole) // parts : (part + 1) * len(whole) // parts])
            time.sleep(0.02)
        assert status(received(stream)) == expected_status


@pytest.mark.parametrize("sent", [b"", request()[:40], request(), UPGRADE])
def test_resets_leave_the_server_healthy(server: Server, http: httpx.Client, expected: bytes, sent: bytes) -> None:
    with unharmed(server, http, expected):
        for _ in range(200):
            with connection(server) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
                stream.sendall(sent)
    wait_for_streams(http, 0)


DEAF = {
    "requests": (b"", request() * 200),
    "pings": (UPGRADE, frame(9, b"x" * 125) * 500),
    "texts": (UPGRADE, frame(1, b'{"ping": true}') * 500),
}


@pytest.mark.parametrize("name", DEAF)
def test_nonreading_client_is_throttled(server: Server, http: httpx.Client, expected: bytes, name: str) -> None:
    begin, again = DEAF[name]
    with unharmed(server, http, expected), connection(server) as stream:
        stream.sendall(begin)
        pour(stream, again, 2**30, seconds=4)


@pytest.mark.parametrize("piece", [b"", b"x"])
def test_endless_websocket_fragments_use_bounded_memory(
    server: Server, http: httpx.Client, expected: bytes, piece: bytes
) -> None:
    with unharmed(server, http, expected), web_socket(server) as stream:
        stream.sendall(frame(1, b'{"ping"', fin=False))
        pour(stream, frame(0, piece, fin=False) * 1000, 3 * 2**20, seconds=3)


def test_message_of_many_fragments_is_accepted(server: Server) -> None:
    with web_socket(server) as stream:
        text = json.dumps({"input_ids": [1, 2]}).encode()
        stream.sendall(frame(1, text[:1], fin=False))
        for index in range(1, len(text)):
            stream.sendall(frame(0, text[index : index + 1], fin=False) + frame(0, b"", fin=False) + frame(9, b""))
        stream.sendall(frame(0, b""))
        answer = b""
        while b"next_offset" not in answer:
            answer += stream.recv(2**16)
        assert b'"next_offset":[2]' in answer


def test_slow_headers_and_bodies_do_not_delay_other_clients(
    server: Server, http: httpx.Client, expected: bytes, long: bool
) -> None:
    """Oracle: all of them are complete in the end, and get the right bits."""
    whole = request("/models/gpt/embed", None, "Accept: application/octet-stream", "Connection: close")
    count = 500 if long else 100
    with unharmed(server, http, expected), ExitStack() as stack:
        heads = [stack.enter_context(connection(server)) for _ in range(count)]
        bodies = [stack.enter_context(connection(server)) for _ in range(count)]
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
            assert answer.endswith(b"\r\n\r\n" + expected)


def test_incomplete_pipelined_head_times_out(server: Server) -> None:
    with connection(server) as stream:
        stream.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET")
        assert status(stream.recv(2**16)) == 200
        assert status(received(stream)) == 408


def test_missing_head_times_out(server: Server) -> None:
    with connection(server) as silent, connection(server) as half, connection(server) as second:
        half.sendall(b"GET /livez HT")
        second.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(second.recv(2**16)) == 200
        second.sendall(b"GET")
        begin = time.monotonic()
        for stream in (silent, half, second):
            answer = received(stream)
            assert status(answer) == 408
            assert answer.endswith(b"\r\n\r\nthe request did not arrive in time")
        assert 1.5 < time.monotonic() - begin < 10


@pytest.mark.parametrize("begin", [b"", request()[:40], request()[:-5], UPGRADE, request() + b"POST"])
def test_half_closed_connection_is_closed(server: Server, http: httpx.Client, begin: bytes) -> None:
    with connection(server) as stream:
        stream.sendall(begin)
        stream.shutdown(socket.SHUT_WR)
        received(stream)
    wait_for_streams(http, 0)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        pytest.param(request("/models/gpt/embed", b"{}xx", "Content-Length: 2"), [422, 400], id="short"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: 9"), [], id="long"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: 2, 2"), [400], id="two-in-one"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: 2", "Content-Length: 2"), [400], id="two"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: -2"), [400], id="negative"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: +2"), [400], id="signed"),
        pytest.param(request("/models/gpt/embed", b"{}", "Content-Length: 0x2"), [400], id="hexadecimal"),
        pytest.param(
            request("/models/gpt/embed", b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"), [400], id="both"
        ),
        pytest.param(request("/models/gpt/embed", b"{}", f"Content-Length: {10**25}"), [400], id="10^25"),
        pytest.param(request("/models/gpt/embed", b"", f"Content-Length: {10**15}"), [413], id="10^15"),
        pytest.param(request("/models/gpt/embed", b"2\r\n{}", "Transfer-Encoding: chunked"), [], id="no-last-chunk"),
        pytest.param(
            request("/models/gpt/embed", b"1\r\n{}\r\n", "Transfer-Encoding: chunked"), [400], id="chunk-too-long"
        ),
        pytest.param(
            request("/models/gpt/embed", b"9\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
            [],
            id="chunk-too-short",
        ),
        pytest.param(
            request("/models/gpt/embed", b"-1\r\n{}\r\n", "Transfer-Encoding: chunked"), [400], id="chunk-of-minus-1"
        ),
        pytest.param(
            request("/models/gpt/embed", b"f" * 17 + b"\r\n", "Transfer-Encoding: chunked"), [400], id="chunk-of-2^68"
        ),
        pytest.param(request("/models/gpt/embed", b"zz\r\n", "Transfer-Encoding: chunked"), [400], id="chunk-of-zz"),
    ],
)
def test_wrong_body_length_is_rejected_or_awaited(
    server: Server, http: httpx.Client, expected: bytes, sent: bytes, statuses: list[int]
) -> None:
    with unharmed(server, http, expected), connection(server) as stream:
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
        assert [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", received(stream))] == statuses


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
def test_invalid_websocket_frame_closes_stream(server: Server, http: httpx.Client, expected: bytes, name: str) -> None:
    sent, code = LIES[name]
    with unharmed(server, http, expected), web_socket(server) as stream:
        stream.sendall(sent)
        answer = received(stream)
        assert (answer[0], int.from_bytes(answer[2:4], "big")) == (0x88, code)


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
def test_invalid_handshake_gets_http_error(server: Server, change: tuple[bytes, bytes], expected_status: int) -> None:
    with connection(server) as stream:
        stream.sendall(UPGRADE.replace(*change))
        assert status(received(stream)) == expected_status


CLOSED = frame(8, (1000).to_bytes(2, "big"))


@pytest.mark.parametrize(
    ("behind", "expected_status"),
    [(b"\x00garbage\r\n\r\n", 400), (b"GET / HT\x00TP\r\n\r\n", 400), (UPGRADE + CLOSED, 101)],
)
def test_error_is_not_written_into_another_response(
    server: Server, tables: dict[str, NDArray[np.float32]], behind: bytes, expected_status: int
) -> None:
    rows = 8000
    body = json.dumps({"input_ids": [[1, 2, 3, 4, 5, 6]] * rows}).encode()
    with connection(server) as stream:
        stream.sendall(request("/models/gpt/embed", body, "Accept: application/octet-stream") + behind)
        answer = received(stream)
    head, _, rest = answer.partition(b"\r\n\r\n")
    content = (tables["tokens"][[1, 2, 3, 4, 5, 6]] + tables["positions"][:6]).tobytes() * rows
    assert status(head) == 200
    assert rest.startswith(content)
    assert status(rest.removeprefix(content)) == expected_status


@contextmanager
def held(server: Server, count: int) -> Iterator[subprocess.Popen[str]]:
    """Hold connections in a process; a line ends it, and it prints the number of served ones."""
    url = httpx.URL(server.address)
    command = [sys.executable, "-m", "tests.reliability.held_connections", url.host, str(url.port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == count
        yield holder


def test_server_answers_beside_many_open_connections(
    tiny_repository: Path,
    expected: bytes,
    long: bool,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are opened by a process, accepted by another, and the client is in a third."""
    # Of descriptors, each process has the same number; the server has others too.
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) if long else 300
    seconds = 60.0 if long else 1.0
    with serve(tiny_repository) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        still_right(client, expected)
        before = memory(server.process.pid)
        with held(server, count) as holder:
            begin = end = time.monotonic()
            served, slowest = 0, 0.0
            while end - begin < seconds:
                began = time.monotonic()
                still_right(client, expected)
                end = time.monotonic()
                served, slowest = served + 1, max(slowest, end - began)
            grown = memory(server.process.pid) - before
            answered, _ = holder.communicate("\n")
    assert grown < 2**14 * count + MOST
    assert (holder.returncode, int(answered)) == (0, count)
    each, most = grown // count, round(1000 * slowest)
    record_property("seen", {"held": count, "bytes each": each, "served beside": served, "slowest in ms": most})
    if long:
        with capsys.disabled():  # how many are held is up to the machine
            print(f"\nheld {count}, {each} bytes each; beside them {served} served, the slowest in {most} ms")  # noqa: T201


def test_non_grpc_bytes_do_not_affect_other_clients(server: Server, http: httpx.Client, expected: bytes) -> None:
    random = np.random.default_rng(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = server.grpc.rpartition(":")
    settings = bytes(3) + b"\x04\x00" + bytes(4)
    with unharmed(server, http, expected):
        for index in range(60):
            kind, length = int(random.integers(0, 12)), int(random.integers(0, 2**24))
            lie = length.to_bytes(3, "big") + bytes([kind, int(random.integers(0, 256))]) + random.bytes(4)
            sent = (b"", preface, preface + settings)[index % 3] + (lie + random.bytes(200)) * (1 + index % 5)
            with socket.create_connection((host, int(port)), 20) as stream, suppress(ConnectionError):
                stream.sendall(sent)
                stream.shutdown(socket.SHUT_WR)
                received(stream)
        with grpc.insecure_channel(server.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for length in (0, 1, 5, 1000):
                with pytest.raises(grpc.RpcError) as refused:
                    call(random.bytes(length), timeout=20)
                assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready
