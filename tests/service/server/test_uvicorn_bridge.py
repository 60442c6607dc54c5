"""Any ASGI application behind the bridge, and the application in starlette's client.

Oracles: uvicorn with its own HTTP protocol, byte for byte, and the answers to GET. Servers of others run it in
tests/e2e/test_asgi_servers.py.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from preblock.service.server.uvicorn_bridge import STARTUP_FAILURE, Server
from tests.support.connections import RawConnection, dial
from tests.support.servers import live_server

HEAD = b" HTTP/1.1\r\nHost: localhost\r\n"
NEXT = b"GET /next" + HEAD + b"Connection: close\r\n\r\n"
TARGETS = ("/", "/a%20b/%C3%A9?x=%20&y", "//a?b?c", "/a#fragment", "/a;b?", "*", "?x", "a", "/%", "/\xe9")
BODIES = (
    b"Content-Length: 5\r\n\r\nhello",
    b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;e=1\r\nllo\r\n0\r\n\r\n",
    b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    b"X-A: 1\r\nx-a: 2\r\nCookie: a\r\ncookie: b\r\n\r\n",
    b"Connection: close\r\n\r\n",
)
ANSWERS = ("length", "unknown", "empty", "close", "nothing", "error", "half", "longer", "shorter")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the scope and the body, in the way of the path."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    kind = scope["path"][1:]
    seen = {name: scope[name] for name in scope if name not in ("server", "client", "headers", "extensions")}
    seen |= {"headers": sorted(scope["headers"]), "body": body, "port": scope["server"][0] == scope["client"][0]}
    content = json.dumps(seen, default=bytes.decode if kind != "\xe9" else repr).encode()
    if kind == "nothing":
        return
    if kind == "error":
        raise RuntimeError(kind)
    if kind == "slow":
        await asyncio.sleep(0.2)
    size = len(content) + {"longer": -1, "shorter": 1}.get(kind, 0)
    headers = [(b"X-Kind", b"a")]
    headers += [] if kind in ("unknown", "empty") else [(b"Content-Length", b"%d" % size)]
    headers += [(b"Connection", b"close")] if kind == "close" else []
    await send({"type": "http.response.start", "status": 204 if kind == "empty" else 200, "headers": headers})
    if kind == "half":
        return
    await send({"type": "http.response.body", "body": content[:100], "more_body": True})
    await send({"type": "http.response.body", "body": content[100:]})
    if kind == "late":
        await asyncio.sleep(0.05)
        raise RuntimeError(kind)


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """Serve the application behind the bridge, and behind uvicorn's protocol."""
    plain = uvicorn.Config(app, http="httptools", ws="none", server_header=False, date_header=False, log_config=None)
    plain.timeout_keep_alive = 60  # longer than a test waits
    own = configure(Settings(port=0), app)
    own.date_header = False
    with ExitStack() as stack:
        yield [f"http://127.0.0.1:{stack.enter_context(live_server(config))}" for config in (own, plain)]


def answers(address: str, sent: bytes) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    with dial(address, 5) as stream:
        stream.sendall(sent)
        return b"".join(iter(lambda: stream.recv(2**16), b""))


@pytest.mark.parametrize(
    "sent",
    [
        *(b"GET " + target.encode("latin-1") + HEAD + b"\r\n" for target in TARGETS),
        *(b"POST /length" + HEAD + body for body in BODIES),
        *(method + b" /" + kind.encode() + HEAD + b"\r\n" for kind in ANSWERS for method in (b"GET", b"HEAD")),
        *(b"GET /" + kind + b" HTTP/1.0\r\n\r\n" for kind in (b"length", b"error")),
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_bridge_answers_as_uvicorn(addresses: list[str], sent: bytes) -> None:
    own = answers(addresses[0], sent + NEXT)
    plain = answers(addresses[1], sent + (NEXT if b'"path": "/next"' in own else b""))  # it resets after a close
    if plain.startswith(b"HTTP/1.1 400 "):  # the connection refuses it in words of its own
        assert own.startswith(b"HTTP/1.1 400 ")
    else:
        assert own == plain


def test_error_after_response_does_not_end_the_next(addresses: list[str]) -> None:
    with RawConnection(addresses[0]) as stream:
        for kind in (b"late", b"slow"):
            assert stream.ask(b"GET /" + kind + HEAD + b"\r\n")[0] == 200


@pytest.mark.parametrize("version", ["0.9", "1.0"])
def test_response_without_length_ends_by_close(addresses: list[str], version: str) -> None:
    received = answers(addresses[0], f"GET /unknown HTTP/{version}\r\nConnection: keep-alive\r\n\r\n".encode())
    head, _, content = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(content)["http_version"] == version


def test_application_that_does_not_start_ends_the_server() -> None:
    async def broken(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "broken"})

    with pytest.raises(SystemExit) as ended:
        Server(configure(Settings(port=0), broken), 1).run(sockets=[])
    assert ended.value.code == STARTUP_FAILURE


FILE = "/docs/static/swagger-ui.css"


@pytest.fixture(scope="module")
def client(wide_repository: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(repository=wide_repository))) as client:
        yield client


def test_head_has_the_headers_of_get(client: TestClient) -> None:
    for path in ("/", "/readyz", "/docs", "/openapi.json", "/models/gpt", "/v2/models/gpt/ready", "/v1/models"):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content, get.status_code) == (200, b"", 200), path
        assert dict(head.headers, **{"x-request-id": ""}) == dict(get.headers, **{"x-request-id": ""}), path


def test_options_lists_allowed_methods(client: TestClient) -> None:
    for path, allow in (
        ("/", "GET, HEAD, POST, OPTIONS"),
        *((path, "GET, HEAD, OPTIONS") for path in ("/livez", "/docs", "/models/gpt", "/v2/health/ready", FILE)),
        *((path, "POST, OPTIONS") for path in ("/models/gpt/embed", "/v1/embeddings", "/v2/models/gpt/infer")),
    ):
        answer = client.options(path)
        assert (answer.status_code, answer.headers["Allow"], answer.content) == (204, allow, b""), path


@pytest.mark.parametrize("lifespan", [True, False])
def test_server_without_lifespan_is_logged_once(
    wide_repository: Path, lifespan: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`TestClient` runs the lifespan only in a `with` block."""
    client = TestClient(create_app(Settings(repository=wide_repository)))
    with client if lifespan else nullcontext(), caplog.at_level(logging.WARNING):
        assert [client.get("/models").status_code for _ in range(2)] == [200, 200]
    assert caplog.text.count("runs no lifespan, so changed API keys") == (0 if lifespan else 1)
