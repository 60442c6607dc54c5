"""Large responses over HTTP: streamed, compressed, unread, and to HTTP/1.0."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from tests.service.server.http_protocol.requests import VOCABULARY, WIDTH, Ids, raw
from tests.support.connections import UPGRADE, dial, http_request
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until


def test_unread_large_response_counts_as_running_request(long_repository: Path) -> None:
    """The first of its form, one like it, one of FastAPI's, and numbers, as they are and compressed."""
    path, body, headers = raw(np.zeros((35, 850), np.int64), 0)
    numbers = "/models/gpt/embed", numbers_of(np.zeros((16, 850), np.int64))
    with (
        serve(long_repository, PREBLOCK_MAX_CONCURRENT_REQUESTS="1") as server,
        httpx.Client(base_url=server.address, timeout=30) as client,
    ):

        def status() -> int:
            return client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code

        for way, whole in (
            ((path, body, headers), True),
            ((path, body, headers), False),
            ((path, body, headers | {"Origin": "http://localhost"}), False),
            ((*numbers, {"Content-Type": "application/json"}), False),
            ((*numbers, {"Content-Type": "application/json", "Accept-Encoding": "gzip"}), False),
        ):
            with dial_narrow(server) as stream:
                stream.sendall(http_request(*way))
                assert stream.recv(12) == b"HTTP/1.1 200"
                assert status() == 503
                left = 35 * 850 * WIDTH * 4 if whole else 0
                while left > 0:
                    left -= len(stream.recv(2**16))
            wait_until(lambda: status() == 200)


def numbers_of(ids: Ids) -> bytes:
    """Return a request for the vectors of `ids` as numbers."""
    return orjson.dumps({"input_ids": ids.tolist(), "encoding": "float"})


def dial_narrow(server: Server) -> socket.socket:
    """Connect a client that takes few bytes at once."""
    url, stream = httpx.URL(server.address), socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect((url.host, url.port))
    return stream


@pytest.mark.parametrize("name", ["numbers", "lines"])
def test_http_1_0_client_gets_no_chunks(long_server: Server, long_client: httpx.Client, name: str) -> None:
    numbers = numbers_of(np.random.default_rng(0).integers(0, VOCABULARY, (25, 200)))
    path, body, accept, kind = {
        "numbers": ("/models/gpt/embed", numbers, "application/json", "application/json"),
        "lines": ("/models/gpt/decode", b'{"input_ids": [[3, 4]]}\n', "application/x-ndjson", "application/x-ndjson"),
    }[name]
    headers = {"Accept": accept, "Content-Type": kind, "Accept-Encoding": "identity"}
    expected = long_client.post(path, content=body, headers=headers)
    assert expected.headers["Transfer-Encoding"] == "chunked"
    with dial(long_server.address) as stream:
        stream.sendall(http_request(path, body, headers).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, content = b"".join(iter(lambda: stream.recv(2**16), b"")).partition(b"\r\n\r\n")
    assert (b"chunked" in head.lower(), b"connection: close" in head.lower()) == (False, True)
    assert content == expected.content


ROWS = {"input_ids": [[1]] * 2700, "pooling": "mean", "encoding": "float"}
"""A request for 8 MB of vectors."""


@pytest.fixture
def narrow_server(wide_repository: Path) -> Iterator[Server]:
    """Serve with memory for 8 MiB of answers."""
    limits = "--max-buffered-response-bytes", str(2**23), "--queue-timeout-seconds", "0.3"
    with serve(wide_repository, *limits) as server:
        yield server


def test_response_over_memory_limit_gets_503_after_wait(narrow_server: Server) -> None:
    """On the path without a task, and through FastAPI; the memory returns with the clients that do not read."""
    request = http_request("/models/gpt/embed", orjson.dumps(ROWS), {"Content-Type": "application/json"})

    def ask(**headers: str) -> httpx.Response:
        return httpx.post(f"{narrow_server.address}/models/gpt/embed", json=ROWS, headers=headers, timeout=20)

    with ExitStack() as stack:
        for _ in range(4):
            unread = stack.enter_context(dial_narrow(narrow_server))
            unread.sendall(request)
            assert unread.recv(15, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200 OK"
        for answer in (ask(), ask(Origin=narrow_server.address)):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json()["detail"] == "The response waited 0.3 s for other large responses. Retry later."
    wait_until(lambda: ask().status_code == 200)


def test_unread_text_step_keeps_only_its_own_size(narrow_server: Server) -> None:
    """While it is computed, it takes all memory: twelve times 3.7 MB."""
    step = orjson.dumps({"input_ids": [[1] * 600] * 2})
    with dial_narrow(narrow_server) as unread:
        unread.sendall(http_request("/models/gpt/decode?encoding=float&rows=2", headers=UPGRADE, method="GET"))
        assert unread.recv(2**12).startswith(b"HTTP/1.1 101 ")
        unread.sendall(b"\x81\xfe" + len(step).to_bytes(2) + bytes(4) + step)
        assert unread.recv(2, socket.MSG_PEEK | socket.MSG_WAITALL) == b"\x81\x7f"
        answer = httpx.post(f"{narrow_server.address}/models/gpt/embed", json=ROWS, timeout=20)
        assert answer.status_code == 200, answer.text
