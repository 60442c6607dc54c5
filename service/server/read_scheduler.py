"""Reads large input in chunks, so that other connections get their turn."""

import asyncio
import time
from collections.abc import Callable

CHUNK_BYTES = 2**14
"""One chunk holds thousands of requests or frames at most."""
MAX_ITERATION_SECONDS = 0.0005
"""After this time the other connections get an event-loop iteration."""


class ReadScheduler:
    """Passes input on, and pauses the transport while input waits or somebody asks for a pause.

    Args:
        transport: of the connection.
        loop: of the connection.
        read: takes one chunk.

    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, read: Callable[[bytes], None]
    ) -> None:
        self._transport, self._loop = transport, loop
        self._read: Callable[[bytes], None] | None = read
        self.rest = memoryview(b"")
        self.paused = False
        self._transport_paused = False
        self._scheduled = False

    def feed(self, data: bytes) -> None:
        """Pass on input, at once if it is short and nothing waits."""
        if self.rest or self.paused or len(data) > CHUNK_BYTES:
            self.rest = memoryview(bytes(self.rest) + data)
            if not self._scheduled:
                self._run()
        elif self._read is not None:
            self._read(data)

    def _run(self) -> None:
        self._scheduled = False
        begin = time.perf_counter()
        while self.rest and not self.paused and self._read is not None and not self._transport.is_closing():
            chunk, self.rest = bytes(self.rest[:CHUNK_BYTES]), self.rest[CHUNK_BYTES:]
            self._read(chunk)
            if time.perf_counter() - begin > MAX_ITERATION_SECONDS:
                break
        self._update_transport()

    def _update_transport(self) -> None:
        """Schedule the rest, and let the transport read only while nothing waits."""
        if self._read is None or self._transport.is_closing():
            return
        if self.rest and not self.paused and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run)
        wanted = self.paused or bool(self.rest)
        if wanted != self._transport_paused:
            self._transport_paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def pause(self) -> None:
        """Pass nothing on until `resume`."""
        self.paused = True
        self._update_transport()

    def resume(self) -> None:
        """Pass input on again, the waiting input first."""
        if self.paused:
            self.paused = False
            self._update_transport()

    def end(self) -> bytes:
        """Pass on nothing more; return the waiting input."""
        rest, self.rest = bytes(self.rest), memoryview(b"")
        self._read = None
        if self._transport_paused and not self._transport.is_closing():
            self._transport.resume_reading()
        return rest
