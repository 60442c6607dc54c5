"""Fast path of a decode WebSocket: it answers simple steps without ASGI messages."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from time import perf_counter

from preblock.service.api.http.streaming.session import DecodeSession
from preblock.service.api.streams import StreamLifetime
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.websocket_frames import binary_head, binary_payload


class StepLane:
    """Answers simple steps of one session, each in the event-loop iteration after its arrival.

    Args:
        transport: of the WebSocket.
        loop: of the WebSocket.
        resume: called after a response, to resume reading.
        writable: set unless the client does not read.
        fail: handles an unexpected exception of a step.

    Attributes:
        busy: whether a step is being answered; no message may overtake it.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        resume: Callable[[], None],
        writable: asyncio.Event,
        fail: Callable[[], None],
    ) -> None:
        self._transport, self._loop, self._resume, self._fail = transport, loop, resume, fail
        self._writable = writable
        self._session: DecodeSession | None = None
        self._lifetime: StreamLifetime | None = None
        self._context = Context()
        self.busy = False

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer simple steps of `session` for the current caller; with None, leave them to the application."""
        self._session, self._lifetime = session, lifetime
        self._context = copy_context()

    @property
    def request(self) -> RequestContext | None:
        """The request of the stream; None before its first message."""
        return self._context.get(CURRENT_REQUEST)

    async def drain(self) -> None:
        """Wait until the client has read the answers."""
        await self._writable.wait()

    def release(self) -> None:
        """Release the memory of the answered steps, because the client has read them."""
        if self._session is not None and self._session.context is not None and not self.busy:
            self._session.context.release()

    def end(self) -> None:
        """Answer no step any more, because the connection is closing."""
        self._session = None

    def begin(self, data: bytes) -> bool:
        """Start to answer `data` if it is exactly one simple step; return whether it is."""
        session, lifetime = self._session, self._lifetime
        if session is None or lifetime is None:
            return False
        payload = binary_payload(data)
        if payload is None or not lifetime.touch():
            return False
        run = self._context.run(session.begin, payload)
        if run is not None:
            self.busy = True
            self._loop.call_soon(self._finish, session, run)
        return run is not None

    def _finish(self, session: DecodeSession, run: FastRun) -> None:
        """Write the response, unless the stream has ended."""
        self.busy = False
        try:
            parts = session.finish(run)
            size, began = 0, perf_counter()
            if self._session is session and not self._transport.is_closing():
                size = sum(map(len, parts))
                self._transport.write(b"".join((binary_head(size), *parts)))
            session.end(run, size, perf_counter() - began)
            if self._writable.is_set():
                self.release()
            self._resume()
        except Exception as error:
            run.end(error)
            self._fail()
