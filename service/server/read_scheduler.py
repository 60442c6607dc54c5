"""Reads large input in chunks, so that other connections are served in between."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from preblock.service.core.large_bodies import LARGE_BODY_BYTES

CHUNK_BYTES = 2**14
"""A chunk holds at most thousands of requests or frames."""
MAX_ITERATION_SECONDS = 0.0004
"""Time for the large input of all connections in one iteration of the event loop. Small input never waits."""


class ReadTurns:
    """Lets connections with large input take turns, a chunk each.

    Every second turn belongs to the large message with the most bytes received. So large messages end one after
    another, instead of all at once, and few of them occupy memory. A slow client delays nobody: it waits for no turn.

    Args:
        loop: of the connections.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[ReadScheduler] = deque()
        self._large: list[tuple[int, int, ReadScheduler]] = []  # heap; the counter keeps equal sizes in order
        self._counter = count()
        self._is_large_next = False
        self._is_scheduled = False
        self._deadline: float | None = None
        """Of this iteration of the loop; None if it has read nothing."""

    def add(self, scheduler: "ReadScheduler") -> None:
        """Read the input of a connection in the next iteration of the loop."""
        self._add(scheduler)
        self._schedule()

    def _add(self, scheduler: "ReadScheduler") -> None:
        received = scheduler.message_bytes()
        if received < LARGE_BODY_BYTES:
            self._waiting.append(scheduler)
        else:
            heappush(self._large, (-received, next(self._counter), scheduler))

    def _next(self) -> "ReadScheduler":
        self._is_large_next = bool(self._large) and (not self._is_large_next or not self._waiting)
        return heappop(self._large)[2] if self._is_large_next else self._waiting.popleft()

    def read(self) -> None:
        """Read waiting input now, if this iteration of the loop has time left."""
        if self._deadline is None:
            self._deadline = time.perf_counter() + MAX_ITERATION_SECONDS
            self._schedule()
        while (self._waiting or self._large) and time.perf_counter() < self._deadline:
            scheduler = self._next()
            if scheduler.read_chunk():
                self._add(scheduler)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled, self._deadline = False, None
        if self._waiting or self._large:
            self.read()


class ReadScheduler:
    """Forwards input, and pauses the transport while input waits or reading is paused.

    Args:
        transport: of the connection.
        turns: of all connections.
        read: receives one chunk.
        message_bytes: returns the bytes received of an incomplete message.
        fail: handles an unexpected exception of `read`, which must not reach the connection whose turn it is.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        turns: ReadTurns,
        read: Callable[[bytes], None],
        message_bytes: Callable[[], int],
        fail: Callable[[], None],
    ) -> None:
        self._transport, self._turns, self._fail = transport, turns, fail
        self.message_bytes = message_bytes
        self._read: Callable[[bytes], None] | None = read
        self.rest = memoryview(b"")
        self.paused = False
        self._transport_paused = False
        self._waiting = False

    def feed(self, data: bytes) -> None:
        """Forward input, at once if it is short and no input waits."""
        if self.rest or self.paused or len(data) > CHUNK_BYTES:
            self.rest = memoryview(bytes(self.rest) + data)
            self._update()
            self._turns.read()
        else:
            self._forward(data)

    def read_chunk(self) -> bool:
        """Forward one chunk of the waiting input, and return whether another one may follow."""
        if self._is_ready():
            # An empty view of the input would keep all of it.
            chunk, self.rest = bytes(self.rest[:CHUNK_BYTES]), self.rest[CHUNK_BYTES:] or memoryview(b"")
            self._forward(chunk)
        self._waiting = self._is_ready()
        self._update_transport()
        return self._waiting

    def _forward(self, data: bytes) -> None:
        try:
            if self._read is not None:
                self._read(data)
        except Exception:
            self._fail()

    def _is_ready(self) -> bool:
        return bool(self.rest) and not self.paused and self._read is not None and not self._transport.is_closing()

    def _update(self) -> None:
        """Take turns with waiting input, and let the transport read only while no input waits."""
        if self._is_ready() and not self._waiting:
            self._waiting = True
            self._turns.add(self)
        self._update_transport()

    def _update_transport(self) -> None:
        if self._read is None or self._transport.is_closing():
            return
        wanted = self.paused or bool(self.rest)
        if wanted != self._transport_paused:
            self._transport_paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def pause(self) -> None:
        """Forward nothing until `resume`."""
        self.paused = True
        self._update_transport()

    def resume(self) -> None:
        """Forward input again, starting with the waiting input."""
        if self.paused:
            self.paused = False
            self._update()

    def end(self) -> bytes:
        """Stop forwarding; return the waiting input."""
        rest, self.rest = bytes(self.rest), memoryview(b"")
        self._read = None
        if self._transport_paused and not self._transport.is_closing():
            self._transport.resume_reading()
        return rest
