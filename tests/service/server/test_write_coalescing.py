"""What is written in one turn of the event loop goes by one call. Oracle: a socket that reads what was sent."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from preblock.service.codecs.chunks import COPIED
from preblock.service.server.write_coalescing import Gathered

LARGE = bytes(COPIED + 1)


def sent(work: Callable[[Gathered, asyncio.Transport], object]) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    """Return what a client has read when `work` is done, and when the turn is over, and what went wrong in the loop."""
    ours, theirs = socket.socketpair()
    wrong: list[dict[str, Any]] = []

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        work(Gathered(transport, loop), transport)
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


def test_what_is_small_waits_for_the_end_of_the_turn() -> None:
    def work(gathered: Gathered, _: asyncio.Transport) -> None:
        for part in (b"head ", b"body ", b"end"):
            gathered.write(part)

    assert sent(work) == (b"", b"head body end", [])


@pytest.mark.parametrize("end", [Gathered.flush, Gathered.close])
def test_who_ends_it_has_it_written(end: Callable[[Gathered], None]) -> None:
    def work(gathered: Gathered, transport: asyncio.Transport) -> None:
        gathered.write(b"head ")
        gathered.write(b"body ")
        end(gathered)
        assert gathered.is_closing() == transport.is_closing() == (end is Gathered.close)
        if end is Gathered.flush:
            transport.write(b"another's")

    at_once, later, wrong = sent(work)
    assert at_once + later == b"head body " + b"another's" * (end is Gathered.flush)
    assert wrong == []


def test_what_is_large_comes_behind_what_is_kept() -> None:
    def work(gathered: Gathered, _: asyncio.Transport) -> None:
        for part in (b"head ", LARGE, b"end"):
            gathered.write(part)

    at_once, later, wrong = sent(work)
    assert at_once + later == b"head " + LARGE + b"end"
    assert wrong == []


def test_a_client_that_has_left_is_written_nothing() -> None:
    """uvloop raises where something is written to a connection that is closed."""

    def work(gathered: Gathered, transport: asyncio.Transport) -> None:
        transport.abort()
        gathered.write(b"head")

    assert sent(work) == (b"", b"", [])
