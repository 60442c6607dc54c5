"""The fast lane of a decode WebSocket: plain steps are answered without an ASGI message for each."""

import asyncio
import logging
import struct
from collections.abc import Callable
from contextvars import Context, copy_context
from time import perf_counter

from preblock.service.api.http.streaming.session import DecodeSession
from preblock.service.api.streams import StreamLifetime
from preblock.service.engine.fast_path import FastRun
from preblock.service.server.websocket_frames import BINARY, binary_payload

LOG = logging.getLogger(__name__)


class StepLane:
    """Answers plain steps of one session, each in the event-loop iteration after it came.

    Args:
        transport: of the WebSocket.
        loop: of the WebSocket.
        resume: reads on, the answer being written.

    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, resume: Callable[[], None]
    ) -> None:
        self._transport, self._loop, self._resume = transport, loop, resume
        self._session: DecodeSession | None = None
        self._lifetime: StreamLifetime | None = None
        self._context = Context()
        self._run: FastRun | None = None

    @property
    def busy(self) -> bool:
        """Whether a step is being answered; no message may overtake it."""
        return self._run is not None

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer plain steps of the session, as the present caller; with None, leave them to the application."""
        self._session, self._lifetime = session, lifetime
        if session is not None:
            self._context = copy_context()

    def begin(self, data: bytes) -> bool:
        """Begin to answer, if the data are exactly one plain step and nothing else is waited for."""
        session, lifetime = self._session, self._lifetime
        if session is None or lifetime is None:
            return False
        payload = binary_payload(data)
        if payload is None or not lifetime.touch():
            return False
        run = self._context.run(session.begin, payload)
        if run is None:
            return False
        self._run = run
        self._loop.call_soon(self._finish, session, run)
        return True

    def _finish(self, session: DecodeSession, run: FastRun) -> None:
        """Write the answer, unless the stream has ended meanwhile."""
        self._run = None
        try:
            head, vectors = session.finish(run)
        except Exception as error:
            LOG.exception("a step failed in an unforeseen way")
            run.end(error)
            self._transport.abort()
            return
        size, began = 0, perf_counter()
        if self._session is session and not self._transport.is_closing():
            size = len(head) + vectors.nbytes
            before = struct.pack("!BBH", BINARY, 126, size) if size < 2**16 else struct.pack("!BBQ", BINARY, 127, size)
            self._transport.write(b"".join((before, head, vectors.data)))
        session.end(run, size, perf_counter() - began)
        self._resume()
