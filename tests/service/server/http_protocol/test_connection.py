"""Connections of HTTP/1.1: keep-alive, disconnects, and idle ones."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import BinaryIO, cast

import httpx
import numpy as np
import pytest
import uvicorn

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.server.http_connection import HttpConnection
from preblock.service.server.run import configure
from tests.service.server.http_protocol.requests import VOCABULARY, WIDTH, raw
from tests.support.connections import UPGRADE, RawConnection, dial, http_request
from tests.support.servers import Server, live_server
from tests.support.waiting import wait_until


def test_connection_is_closed_on_request(long_server: Server) -> None:
    path, body, headers = raw(np.array([[1]]), 0)
    for _ in range(3):
        with dial(long_server.address) as stream:
            stream.sendall(http_request(path, body, headers | {"Connection": "close"}))
            answer = b"".join(iter(lambda: stream.recv(65536), b""))
            assert b"connection: close\r\n" in answer
            assert len(answer.partition(b"\r\n\r\n")[2]) == 4 * WIDTH


def test_late_body_after_long_head_is_no_request(long_server: Server) -> None:
    """The response comes before the body. The body holds a whole request, which must not be answered."""
    hidden, live = http_request("/nowhere"), http_request("/livez", method="GET")
    for coding, body in (
        ({"Content-Length": str(len(hidden))}, hidden),
        ({"Transfer-Encoding": "chunked"}, b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)),
    ):
        head = http_request("/models/nothing/bias", headers={"X-Long": "a" * 5000, **coding})
        with RawConnection(long_server.address) as stream:
            for _ in range(2):
                assert b"got nothing, expected" in stream.ask(head)[2]
                assert stream.ask(body + live)[0] == 200


OFFER = {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
"""Offer of HTTP/2 by Java's HTTP client (RFC 7540, section 3.2)."""


def test_offer_of_http_2_before_a_close_is_ignored(long_server: Server) -> None:
    path, body, headers = raw(np.array([[3, 4]]), 5)
    sent = http_request(path, body, headers | OFFER | {"Connection": "close, Upgrade, HTTP2-Settings"})
    for version in (b"1.0", b"1.1"):
        with RawConnection(long_server.address) as stream:
            assert stream.ask(sent.replace(b"HTTP/1.1", b"HTTP/" + version))[0] == 200
            assert stream.file.read() == b""


def test_absolute_target_is_answered_as_its_path(long_server: Server, long_client: httpx.Client) -> None:
    path, body, headers = raw(np.array([[3, 4]]), 5)
    with RawConnection(long_server.address) as stream:
        for _ in range(2):  # the second by the known head
            answer = stream.ask(http_request(f"http://user@a.localhost:80{path}", body, headers))
            assert answer[2] == long_client.post(path, content=body, headers=headers).content
        for target in ("HTTP://localhost", "https://localhost?a=b", "http://[::1]/"):
            assert stream.ask(http_request(target, method="GET"))[0] == 200
        load = http_request("http://a.localhost/v2/repository/models/gpt/load", headers={"Origin": "http://x"})
        assert stream.ask(load)[2].endswith(b'expected the origin of a.localhost"}')
        assert stream.ask(http_request("http://evil.example/readyz", method="GET"))[0] == 421
    for target in ("http://y@/readyz", "http://a@b@/readyz", "http:///readyz"):  # no host
        with RawConnection(long_server.address) as stream:
            assert stream.ask(http_request(target, method="GET"))[0] == 400
    with dial(long_server.address) as socket_:
        socket_.sendall(http_request("http://127.1.2.3:5/models/gpt/decode", headers=UPGRADE, method="GET"))
        assert socket_.recv(2**16).startswith(b"HTTP/1.1 101 ")


def test_http_1_0_connection_is_kept_on_request(long_server: Server) -> None:
    """`ab -k` counts such responses."""
    body, kept = b'{"input_ids": [1]}', {"Connection": "Keep-Alive"}
    asked = [
        (http_request("/livez", headers=kept, method="GET"), 200),
        (http_request("/models/gpt/embed", body, kept), 200),
        (http_request("/models/gpt/embed", b"{", kept), 400),
        (http_request("/nowhere", body, kept), 404),
    ]
    with RawConnection(long_server.address) as stream:
        for sent, status in asked * 2:
            found, head, _ = stream.ask(sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            assert (found, "connection: keep-alive" in head.lower()) == (status, True)
        answer = stream.ask(b"GET /livez HTTP/1.0\r\n\r\n")
        assert (answer[0], "connection: close" in answer[1]) == (200, True)
        assert stream.file.read() == b""
    chunked = kept | {"Transfer-Encoding": "chunked"}
    sent = http_request("/models/gpt/embed", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), chunked)
    with RawConnection(long_server.address) as stream:  # RFC 9112, section 6.1: faulty, so nothing may follow
        assert "connection: close" in stream.ask(sent.replace(b"HTTP/1.1", b"HTTP/1.0", 1))[1]


def test_disconnect_stops_the_computation(long_server: Server, long_client: httpx.Client) -> None:
    sent = http_request(*raw(np.ones((70, 850), np.int64), 0))

    def counts() -> tuple[int, int]:
        (model,) = long_client.get("/v2/models/gpt/stats").json()["model_stats"]
        return tuple(model["inference_stats"][kind]["count"] for kind in ("success", "fail"))

    with RawConnection(long_server.address) as connection:
        assert len(connection.ask(sent)[2]) == 70 * 850 * WIDTH * 4
    success, fail = counts()
    with dial(long_server.address) as stream:
        stream.sendall(sent)
        assert stream.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: counts() != (success, fail))
    assert counts() == (success, fail + 1)


def test_small_requests_of_many_connections_share_runs(long_server: Server, long_client: httpx.Client) -> None:
    asked = [raw(np.array([[number]]), 3) for number in range(20)]
    expected = [long_client.post(path, content=body, headers=headers).content for path, body, headers in asked]

    def counts() -> tuple[int, int]:
        (stats,) = long_client.get("/v2/models/gpt/stats").json()["model_stats"]
        return stats["inference_count"], stats["execution_count"]

    requests, runs = counts()
    with ExitStack() as stack:
        streams = [stack.enter_context(RawConnection(long_server.address)) for _ in range(20)]
        for sent in range(20, 20 * 100, 20):  # on a busy machine requests may arrive one by one
            for stream, request in zip(streams, asked, strict=True):
                stream.send(http_request(*request))
            for stream, vectors in zip(streams, expected, strict=True):
                assert stream.answer()[2] == vectors
            assert counts()[0] - requests == sent
            if counts()[1] - runs < sent:
                return
    pytest.fail("each request had a run of its own")


def test_other_method_is_not_prepared(long_client: httpx.Client) -> None:
    path, body, headers = raw(np.array([[1, 2]]), 0)
    for _ in range(2):
        assert long_client.post(path, content=body, headers=headers).status_code == 200
    for method in ("PUT", "DELETE"):
        assert long_client.request(method, path, content=body, headers=headers).status_code == 405


POOL_SECONDS = 5
"""So long httpx keeps an idle connection."""
KEPT_SECONDS = 1
"""So long the hasty server keeps one."""


def request(*ids: int) -> bytes:
    path, body, headers = raw(np.array([ids]), 0)
    return http_request(path, body, headers)


@pytest.fixture
def hasty_address(long_repository: Path) -> Iterator[str]:
    settings = Settings(repository=long_repository)
    config = configure(settings, create_app(settings))
    config.timeout_keep_alive = KEPT_SECONDS
    with live_server(config) as port:
        yield f"http://127.0.0.1:{port}"


def test_idle_connection_outlives_pools_of_clients(long_server: Server) -> None:
    with RawConnection(long_server.address) as tensors, RawConnection(long_server.address) as others:
        for pause in (POOL_SECONDS + 0.5, 0):
            assert tensors.ask(request(1, 2))[0] == 200
            assert others.ask(http_request("/livez", method="GET"))[0] == 200
            time.sleep(pause)


def test_idle_connection_is_closed_at_last(hasty_address: str) -> None:
    for sent in (request(1, 2), http_request("/livez", method="GET")):
        with RawConnection(hasty_address) as client:
            assert client.ask(sent)[0] == 200
            began = time.monotonic()
            assert client.stream.recv(1) == b""
            assert time.monotonic() - began > 0.9 * KEPT_SECONDS


def test_repeated_head_waits_for_its_body(hasty_address: str) -> None:
    sent, other = request(1, 2), request(3)
    begin = sent.index(b"\r\n\r\n") + 4
    with RawConnection(hasty_address) as client:
        expected, of_other = client.ask(sent)[2], client.ask(other)[2]
        for _ in range(3):
            assert client.ask(sent)[2] == expected
        client.send(sent[:begin])
        time.sleep(KEPT_SECONDS + 0.5)
        client.send(sent[begin:] + other + sent[:begin])
        assert [client.answer()[2] for _ in range(2)] == [expected, of_other]
        assert client.ask(sent[begin:])[2] == expected
        client.send(sent[:begin])
    with RawConnection(hasty_address) as client:
        assert client.ask(sent)[2] == expected


def chunks_of(answer: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks of an answer (RFC 9112, section 7.1)."""
    while answer.readline() != b"\r\n":
        pass
    while size := int(answer.readline(), 16):
        yield answer.read(size)
        answer.readline()
    answer.readline()


def test_disconnect_after_last_chunk_is_not_logged(long_repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, body, headers = raw(np.random.default_rng(0).integers(0, VOCABULARY, (4, 775)), 0)
    request = http_request(path, body, headers | {"Accept-Encoding": "gzip"})
    settings = Settings(repository=long_repository)
    server = uvicorn.Server(configure(settings, create_app(settings)))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as stream:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as there may be
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        stream.settimeout(30)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        stream.connect(listener.getsockname())
        with stream.makefile("rb", buffering=1) as answer:  # reads no further than requested
            stream.sendall(request)
            sizes = [len(chunk) for chunk in chunks_of(answer)]
            connection = cast(HttpConnection, next(iter(server.server_state.connections)))
            transport = connection.client.transport
            connection.shared.loop.call_soon_threadsafe(transport.set_write_buffer_limits, 0)
            stream.sendall(request)
            assert [len(chunk) for chunk in islice(chunks_of(answer), len(sizes) - 1)] == sizes[:-1]
            wait_until(lambda: 0 < transport.get_write_buffer_size() < sizes[-1])  # no socket holds the last chunk
        stream.close()
        wait_until(lambda: not (server.server_state.connections or connection.shared.tasks))
        server.should_exit = True
        thread.join()
    assert "ERROR" not in capfd.readouterr().err
