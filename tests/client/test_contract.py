"""The common contract of transports and sockets of both clients: errors, limits of time, and the choice of a server."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Timer
from typing import Any

import pytest

from preblock.client.access import Replicas, read_replicas
from preblock.client.errors import ConnectionFailed, NoAnswer, RequestError, TimedOut
from preblock.client.sockets import AsyncSocket, SyncSocket
from preblock.client.transport import AsyncTransport, SyncTransport
from tests.client.conftest import raises_kind
from tests.client.flaky_proxy import CUT, DROP, STALL, SWALLOW, FlakyProxy, canned
from tests.support.servers import free_port

LARGE = bytes(12_000_000)
"""More than the buffers of a connection hold, and less than the service allows."""


class Transport:
    """A transport; `run` runs its methods."""

    def __init__(self, kind: type[AsyncTransport | SyncTransport], replicas: Replicas, run: Callable[..., Any]) -> None:
        self._transport: Any = kind(replicas)
        self._run = run

    def connect(self) -> None:
        self._run(self._transport.request, "GET", "/livez", b"", {})

    def exchange(self, content: bytes) -> None:
        """Send content without a meaning; to be refused is an answer."""
        with suppress(RequestError):
            self._run(self._transport.request, "POST", "/models/gpt/embed", content, {})

    def close(self) -> None:
        self._run(self._transport.close if isinstance(self._transport, SyncTransport) else self._transport.aclose)


class Socket:
    """A socket; `run` runs its methods."""

    def __init__(self, kind: type[AsyncSocket | SyncSocket], replicas: Replicas, run: Callable[..., Any]) -> None:
        self._socket: Any = kind(replicas)
        self._run = run

    def connect(self) -> None:
        self._run(self._socket.connect, "/models/gpt/decode")

    def exchange(self, content: bytes) -> None:
        """Send content without a meaning; to be refused is an answer."""
        self._run(self._socket.exchange, content)

    def close(self) -> None:
        self._run(self._socket.close)


Line = Transport | Socket
Open = Callable[[str, float], tuple[Line, Replicas]]


@pytest.fixture(params=[SyncTransport, AsyncTransport, SyncSocket, AsyncSocket])
def line_to(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Return a function of a URL and a timeout: a line to two servers, both at this URL, and these servers."""
    kind, lines = request.param, []
    with asyncio.Runner() as runner:

        def run(method: Callable[..., Any], *arguments: Any) -> Any:
            found = method(*arguments)
            return runner.run(found) if asyncio.iscoroutine(found) else found

        def opened(url: str, timeout: float) -> tuple[Line, Replicas]:
            replicas = read_replicas([url, url], timeout, None)
            line: Line = (Transport if kind in (SyncTransport, AsyncTransport) else Socket)(kind, replicas, run)
            lines.append(line)
            return line, replicas

        yield opened
        for line in lines:
            line.close()


@pytest.mark.parametrize(
    ("act", "kind", "retry_after"),
    [
        (DROP, "ConnectionFailed", 0),
        (SWALLOW, "ConnectionFailed", 0),
        (CUT, "ConnectionFailed", 0),
        (STALL, "TimedOut", None),
        (canned("503 Service Unavailable", b"", "Retry-After: 7"), "Unavailable", 7),
        (canned("429 Too Many Requests"), "RateLimited", 0),
        (canned("502 Bad Gateway", b"<html>"), "status 502", 0),
        (canned("404 Not Found"), "status 404", None),
    ],
    ids=range(8),
)
def test_failed_opening_has_kind_and_pause(
    line_to: Open, flaky: FlakyProxy, act: str | bytes, kind: str, retry_after: float | None
) -> None:
    line, replicas = line_to(flaky.address, 0.5 if act == STALL else 30)
    before, flaky.script = replicas.current, [act]
    with raises_kind(kind) as raised:
        line.connect()
    assert raised.value.retry_after == retry_after
    # Another server is used after every error that it may mend, and after a timeout.
    unanswered = isinstance(raised.value, NoAnswer)
    assert (replicas.current is not before) == (unanswered or retry_after is not None)
    assert not unanswered or flaky.address in str(raised.value)
    line.connect()
    assert flaky.connections == 2


def test_missing_server_is_a_failed_connection(line_to: Open) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    line, replicas = line_to(address, 30)
    before = replicas.current
    with pytest.raises(
        ConnectionFailed, match=rf"{address} \(ConnectionRefusedError|{address} \(ConnectError"
    ) as raised:
        line.connect()
    assert raised.value.retry_after == 0
    assert replicas.current is not before


def test_broken_exchange_is_a_failed_connection(line_to: Open, flaky: FlakyProxy) -> None:
    line, replicas = line_to(flaky.address, 30)
    line.connect()
    before = replicas.current
    flaky.hold()
    Timer(0.3, flaky.break_all).start()
    with pytest.raises(ConnectionFailed, match=flaky.address) as raised:
        line.exchange(b"a")
    assert raised.value.retry_after == 0
    assert replicas.current is not before


@pytest.mark.parametrize("content", [b"a", LARGE], ids=["read", "write"])
def test_exchange_and_close_end_in_time(line_to: Open, flaky: FlakyProxy, content: bytes) -> None:
    """The server answers a small request never, and reads a large one in part."""
    line, _ = line_to(flaky.address, 0.5)
    line.connect()
    flaky.hold()
    flaky.hold_requests()
    began = time.monotonic()
    with pytest.raises(TimedOut, match=flaky.address) as raised:
        line.exchange(content)
    assert 0.4 < time.monotonic() - began < 10
    assert raised.value.retry_after is None
    line.close()
    assert time.monotonic() - began < 15


def test_write_and_read_have_a_timeout_each(line_to: Open, flaky: FlakyProxy) -> None:
    line, _ = line_to(flaky.address, 2)
    line.connect()
    flaky.hold()
    flaky.hold_requests()
    for seconds, release in ((1.2, flaky.release_requests), (2.4, flaky.release)):
        Timer(seconds, release).start()
    began = time.monotonic()
    line.exchange(LARGE)
    assert time.monotonic() - began > 2.3


def test_idle_connection_has_no_timeout(line_to: Open, flaky: FlakyProxy) -> None:
    line, _ = line_to(flaky.address, 0.5)
    line.connect()
    time.sleep(1)
    line.exchange(b"a")
    assert flaky.connections == 1
