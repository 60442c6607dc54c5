"""Small writes of one event-loop iteration go by one call. Oracle: the other end of the socket."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from preblock.service.codecs.chunks import MIN_WRITE_BYTES
from preblock.service.server.inner_transport import InnerTransport

LARGE = bytes(MIN_WRITE_BYTES + 1)


class Owner:
    """A connection with the methods of `InnerTransport`'s owner."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport, self.loop = transport, loop
        self.close = transport.close

    def pause_reading(self) -> None:
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()


def sent(work: Callable[[InnerTransport, asyncio.Transport], object]) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    """Return the bytes read right after `work`, the bytes read after the iteration, and the errors of the loop."""
    ours, theirs = socket.socketpair()
    wrong: list[dict[str, Any]] = []

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        work(InnerTransport(Owner(transport, loop)), transport)
        at_once = read()
        for _ in range(3):
            await asyncio.sleep(0)
        transport.close()
        return at_once

    def read() -> bytes:
        found = bytearray()
        while True:
            try:
                part = theirs.recv(2**20)
            except BlockingIOError:
                return bytes(found)
            if not part:
                return bytes(found)
            found += part

    with theirs:
        theirs.setblocking(False)
        at_once = uvloop.run(run())
        return at_once, read(), wrong


def test_small_writes_are_coalesced_in_one_iteration() -> None:
    def work(inner: InnerTransport, _: asyncio.Transport) -> None:
        for part in (b"head ", b"body ", b"end"):
            inner.write(part)

    assert sent(work) == (b"", b"head body end", [])


@pytest.mark.parametrize("end", [InnerTransport.flush, InnerTransport.close])
def test_flush_and_close_write_pending_parts(end: Callable[[InnerTransport], None]) -> None:
    def work(inner: InnerTransport, transport: asyncio.Transport) -> None:
        inner.write(b"head ")
        inner.write(b"body ")
        end(inner)
        assert inner.is_closing() == transport.is_closing() == (end is InnerTransport.close)
        if end is InnerTransport.flush:
            transport.write(b"another's")

    at_once, later, wrong = sent(work)
    assert at_once + later == b"head body " + b"another's" * (end is InnerTransport.flush)
    assert wrong == []


def test_large_write_follows_pending_parts() -> None:
    def work(inner: InnerTransport, _: asyncio.Transport) -> None:
        for part in (b"head ", LARGE, b"end"):
            inner.write(part)

    at_once, later, wrong = sent(work)
    assert at_once + later == b"head " + LARGE + b"end"
    assert wrong == []


def test_aborted_connection_is_written_nothing() -> None:
    """uvloop raises on a write to a closed connection."""

    def work(inner: InnerTransport, transport: asyncio.Transport) -> None:
        transport.abort()
        inner.write(b"head")

    assert sent(work) == (b"", b"", [])
