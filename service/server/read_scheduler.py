"""Reads large input in chunks, so that other connections are served in between."""

import asyncio
import time
from collections.abc import Callable

CHUNK_BYTES = 2**14
"""A chunk holds at most thousands of requests or frames."""
MAX_ITERATION_SECONDS = 0.0005
"""After this time, other connections get an event-loop iteration."""


class ReadScheduler:
    """Forwards input, and pauses the transport while input waits or reading is paused.

    Args:
        transport: of the connection.
        loop: of the connection.
        read: receives one chunk.

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
        """Forward input, at once if it is short and no input waits."""
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
        """Schedule waiting input, and let the transport read only while no input waits."""
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
        """Forward nothing until `resume`."""
        self.paused = True
        self._update_transport()

    def resume(self) -> None:
        """Forward input again, starting with the waiting input."""
        if self.paused:
            self.paused = False
            self._update_transport()

    def end(self) -> bytes:
        """Stop forwarding; return the waiting input."""
        rest, self.rest = bytes(self.rest), memoryview(b"")
        self._read = None
        if self._transport_paused and not self._transport.is_closing():
            self._transport.resume_reading()
        return rest
