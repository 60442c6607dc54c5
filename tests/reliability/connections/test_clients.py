"""Clients that reset, close halfway, never read, lie about their body, stay, or speak no HTTP."""

import re
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.reliability.connections.hostile import MOST, pour, unharmed
from tests.reliability.wires import UPGRADE, connection, frame, memory, received, request, still_right
from tests.support.paths import ROOT
from tests.support.scrapes import wait_for_streams
from tests.support.servers import Server, serve


@pytest.mark.parametrize("sent", [b"", request()[:40], request(), UPGRADE])
def test_resets_leave_the_server_healthy(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, sent: bytes
) -> None:
    with unharmed(hostile_server, hostile_http, good_answer):
        for _ in range(200):
            with connection(hostile_server) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends a reset
                stream.sendall(sent)
    wait_for_streams(hostile_http, 0)


DEAF = {
    "requests": (b"", request() * 200),
    "pings": (UPGRADE, frame(9, b"x" * 125) * 500),
    "texts": (UPGRADE, frame(1, b'{"ping": true}') * 500),
}


@pytest.mark.parametrize("name", DEAF)
def test_nonreading_client_is_throttled(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, name: str
) -> None:
    begin, again = DEAF[name]
    with unharmed(hostile_server, hostile_http, good_answer), connection(hostile_server) as stream:
        stream.sendall(begin)
        pour(stream, again, 2**30, seconds=4)


@pytest.mark.parametrize("begin", [b"", request()[:40], request()[:-5], UPGRADE, request() + b"POST"])
def test_half_closed_connection_is_closed(hostile_server: Server, hostile_http: httpx.Client, begin: bytes) -> None:
    with connection(hostile_server) as stream:
        stream.sendall(begin)
        stream.shutdown(socket.SHUT_WR)
        received(stream)
    wait_for_streams(hostile_http, 0)


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
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes, sent: bytes, statuses: list[int]
) -> None:
    with unharmed(hostile_server, hostile_http, good_answer), connection(hostile_server) as stream:
        stream.sendall(sent)
        stream.shutdown(socket.SHUT_WR)
        assert [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", received(stream))] == statuses


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
    good_answer: bytes,
    long: bool,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are opened by a process, accepted by another, and the client is in a third."""
    # Of descriptors, each process has the same number; the server has others too.
    count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) if long else 300
    seconds = 60.0 if long else 1.0
    with serve(tiny_repository) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        still_right(client, good_answer)
        before = memory(server.pid)
        with held(server, count) as holder:
            begin = end = time.monotonic()
            served, slowest = 0, 0.0
            while end - begin < seconds:
                began = time.monotonic()
                still_right(client, good_answer)
                end = time.monotonic()
                served, slowest = served + 1, max(slowest, end - began)
            grown = memory(server.pid) - before
            answered, _ = holder.communicate("\n")
    assert grown < 2**14 * count + MOST
    assert (holder.returncode, int(answered)) == (0, count)
    each, most = grown // count, round(1000 * slowest)
    record_property("seen", {"held": count, "bytes each": each, "served beside": served, "slowest in ms": most})
    if long:
        with capsys.disabled():  # how many are held is up to the machine
            print(f"\nheld {count}, {each} bytes each; beside them {served} served, the slowest in {most} ms")  # noqa: T201


def test_non_grpc_bytes_do_not_affect_other_clients(
    hostile_server: Server, hostile_http: httpx.Client, good_answer: bytes
) -> None:
    random = np.random.default_rng(0)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    host, _, port = hostile_server.grpc.rpartition(":")
    settings = bytes(3) + b"\x04\x00" + bytes(4)
    with unharmed(hostile_server, hostile_http, good_answer):
        for index in range(60):
            kind, length = int(random.integers(0, 12)), int(random.integers(0, 2**24))
            lie = length.to_bytes(3, "big") + bytes([kind, int(random.integers(0, 256))]) + random.bytes(4)
            sent = (b"", preface, preface + settings)[index % 3] + (lie + random.bytes(200)) * (1 + index % 5)
            with socket.create_connection((host, int(port)), 20) as stream, suppress(ConnectionError):
                stream.sendall(sent)
                stream.shutdown(socket.SHUT_WR)
                received(stream)
        with grpc.insecure_channel(hostile_server.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for length in (0, 1, 5, 1000):
                with pytest.raises(grpc.RpcError) as refused:
                    call(random.bytes(length), timeout=20)
                assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready
