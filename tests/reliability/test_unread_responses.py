"""Clients that hold the memory of large responses without reading: they make room for others, and only then."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from preblock.service.core.large_bodies import MAX_LARGEST_BODIES
from tests.reliability.wires import UPGRADE, frame
from tests.support.connections import http_request
from tests.support.servers import Server, serve

LARGEST, TOKENS = 2**23, 2000  # a response has 6 of 8 MiB
STALL_SECONDS = 1
OPTIONS = ("--max-buffered-response-bytes", str(LARGEST), "--body-timeout-seconds", str(STALL_SECONDS))
FIELDS: dict[str, object] = {"input_ids": [[1]] * TOKENS, "pooling": "mean"}
HTTP = http_request("/models/gpt2-small/embed", json.dumps(FIELDS).encode(), {"Content-Type": "application/json"})
STEP = frame(1, b'{"input_ids": [[1%s]]}' % (b",1" * 4095))
REQUESTS = {
    "connection": HTTP,
    "application": HTTP.replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "socket": UPGRADE.replace(b"/gpt/", b"/transformer-base/") + STEP,
}
HOLDERS = MAX_LARGEST_BODIES + 1
"""More clients than the memory has largest responses."""


@pytest.fixture(scope="module", params=["tcp", "unix"])
def server(
    request: pytest.FixtureRequest, model_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    unix = () if request.param == "tcp" else ("--uds", str(tmp_path_factory.mktemp("uds") / "http.sock"))
    with serve(model_repository, *OPTIONS, *unix) as running:
        yield running


def ask(server: Server, request: bytes, stack: ExitStack) -> socket.socket:
    """Send a request on a connection with a small window, and return the connection."""
    url = urlsplit(server.address)
    stream = stack.enter_context(socket.socket(socket.AF_UNIX if "+unix" in url.scheme else socket.AF_INET))
    stream.settimeout(20)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect(unquote(url.netloc) if "+unix" in url.scheme else (url.hostname, url.port))
    stream.sendall(request)
    return stream


def received_bytes(stream: socket.socket) -> int:
    """Return the bytes until the response is complete, or the connection ends."""
    size = 0
    while size < 4 * TOKENS * 768 and (part := stream.recv(2**16)):
        size += len(part)
    return size


@pytest.mark.parametrize("name", REQUESTS)
def test_unread_responses_make_room_for_others(server: Server, name: str) -> None:
    with ExitStack() as stack:
        for _ in range(HOLDERS):
            ask(server, REQUESTS[name], stack)
        time.sleep(0.5)
        assert received_bytes(ask(server, HTTP, stack)) >= 4 * TOKENS * 768  # within the timeout of `ask`


def test_unread_response_without_others_stays(server: Server) -> None:
    with ExitStack() as stack:
        stream = ask(server, HTTP, stack)
        time.sleep(4 * STALL_SECONDS)
        assert received_bytes(stream) >= 4 * TOKENS * 768
