"""What uvicorn's connections would take from a client without end, bounded: heads, fragments, pings, and the time of
others.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from httptools import HttpParserError
from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

LONGEST_HEAD = 2**16
"""Bytes of the first line of a request and its headers, and of what may follow the last chunk of a body."""
TOO_LONG = f"headers: got more than {LONGEST_HEAD} bytes, allowed at most {LONGEST_HEAD} bytes"
PART = 2**14
"""Bytes of one read that are read together: thousands of requests or frames fit into one."""
TURN_SECONDS = 0.0005
"""After which others have their turn: the event loop would read on for as long as more is there."""


class Turns(FlowControl):
    """Reads what a client has sent at once in parts, so that others are answered between them.

    Args:
        transport: of the connection; nothing is read from it in the meantime.
        loop: of the connection.
        read: reads a part.
        waiting: requests that were read and wait for their turn; before them nothing more is read. Default: none.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[bytes], None],
        waiting: Collection[object] = (),
    ) -> None:
        super().__init__(transport)
        self._loop, self._read, self._waiting = loop, read, waiting
        self.rest = memoryview(b"")
        self._scheduled = False

    def take(self, data: bytes) -> None:
        """Read more than fits into one turn."""
        self._transport.pause_reading()
        self.rest = memoryview(bytes(self.rest) + data)
        self._next()

    def _next(self) -> None:
        self._scheduled = False
        if self._transport.is_closing():
            self.end()
            return
        begin = time.perf_counter()
        while self.rest and not self.read_paused and not self._transport.is_closing():
            part, self.rest = bytes(self.rest[:PART]), self.rest[PART:]
            self._read(part)
            if time.perf_counter() - begin > TURN_SECONDS:
                break
        if self.rest and not self.read_paused:
            self._schedule()
        elif not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next)

    def resume_reading(self) -> None:
        """Read on, unless requests wait: first what was read, and has not had its turn."""
        if self._waiting:
            return
        if self.rest and self.read_paused:
            self.read_paused = False
            self._schedule()
        else:
            super().resume_reading()

    def end(self) -> None:
        """Forget what has not been read, and who would read it."""
        self.rest = memoryview(b"")
        self._read = _ignore


def _ignore(_: bytes) -> None:
    """Read nothing."""


class BoundedHttp(HttpToolsProtocol):
    """A connection of HTTP/1.1 that refuses heads that are too long or do not come, and nothing within an answer."""

    cycle: RequestResponseCycle | None  # type: ignore[assignment]
    # Bytes since a head, a part of a body or a whole request: of a head, or of what follows the last chunk.
    unfinished = 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self.flow = self.turns = Turns(transport, self.loop, self._read, self.pipeline)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self.turns.end()
        if self._late is not None:
            self._late.cancel()

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.app_state["streams"].idle, self._refuse, 408, "the request did not come")

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        if len(data) > PART:
            self.turns.take(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        self.unfinished += len(data)
        super().data_received(data)
        if self.unfinished > LONGEST_HEAD:
            self._refuse(431, TOO_LONG)
        elif self.unfinished and self._late is None:
            self._wait_for_head()

    def head_came(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse a head that is too long though it came at once."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self.unfinished > LONGEST_HEAD:
            size = len(self.url) + sum(len(name) + len(value) for name, value in headers)
            if size > LONGEST_HEAD:
                self._refuse(431, TOO_LONG)
                raise HttpParserError(TOO_LONG)
        self.unfinished = 0

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self.head_came(self.headers)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self.unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body."""
        self.unfinished = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Become a WebSocket, unless the answer to another request has still to be sent."""
        if self.cycle is None or self.cycle.response_complete:
            self.turns.end()
            super().handle_websocket_upgrade()
        else:
            self._refuse(400, "an upgrade before the answer to another request")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, text: str) -> None:
        """Answer what cannot be read, and nothing behind it.

        No word of it may stand within the answer to another request, or before it.
        """
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self.pipeline or (cycle is not None and cycle.response_started and not cycle.response_complete):
            self.transport.close()
        elif cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            self.flow.pause_reading()
        else:
            content = text.encode()
            lines = [STATUS_LINE[status]]
            for name, value in (
                *self.server_state.default_headers,
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", b"%d" % len(content)),
                (b"connection", b"close"),
            ):
                lines += (name, b": ", value, b"\r\n")
            self.transport.write(b"".join((*lines, b"\r\n", content)))
            self.transport.close()


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that keeps no more of its client than one message, and reads no faster than that one does."""

    frames: list[bytes | bytearray]  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        super().connection_made(transport)
        self.turns = Turns(self.transport, self.loop, self._read)

    def connection_lost(self, exc: Exception | None) -> None:
        """Read nothing more."""
        super().connection_lost(exc)
        self.turns.end()

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        if self.close_sent:  # nobody takes messages any more
            self.turns.resume_reading()
        if len(data) > PART:
            self.turns.take(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Read a part of it, or answer a handshake that is refused before it can be read."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            refusal = b"".join(self.conn.data_to_send())
            self.transport.write(refusal or STATUS_LINE[400] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message; others are answered before it, where the client has not waited for its answer."""
        message = await self.queue.get()
        if not self.queue.empty():
            await asyncio.sleep(0)
        elif self.read_paused:
            self.read_paused = False
            self.turns.resume_reading()
        return message

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment to its message: a list of them would take many times their bytes."""
        if not isinstance(self.frames[0], bytearray):
            self.frames[0] = bytearray(self.frames[0])
        self.frames[0] += event.data
        if event.fin:
            self.frames[0] = bytes(self.frames[0])
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Hand a message over, and read the next when that was taken."""
        super().send_receive_event_to_app()
        if self.read_paused:
            self.turns.pause_reading()

    def pause_writing(self) -> None:
        """Take nothing from who does not read: each ping would be answered."""
        super().pause_writing()
        self.turns.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        super().resume_writing()
        if not self.read_paused:
            self.turns.resume_reading()
