"""The connections of clients, as uvicorn has them. Requests for tensors are answered in them: the tasks and messages of
ASGI would cost as much as all the rest of a small answer. Everything else is the application's.
"""

import asyncio
import logging
from contextvars import copy_context
from typing import Any

from fastapi.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from incipit.service.api.arrival import Arrival
from incipit.service.api.entry import Entry, Target
from incipit.service.api.reply import Reply
from incipit.service.loop import drive
from incipit.service.streams import LIFETIME

LOG = logging.getLogger(__name__)
LONGEST_BODY = 2**16
"""Bytes of a body that is awaited here, its length being told; ids of more have answers that take long anyway."""
ELSEWHERE = {b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"}
"""Headers of requests that are the application's."""


async def _nothing() -> Any:
    """Receive nothing more: the body is there."""
    raise RuntimeError("a body that was received")


class _Turn:
    """Stands where uvicorn has the request that is answered, while that is one that is answered here."""

    disconnected = False

    def __init__(self, keep_alive: bool) -> None:
        self.response_complete = False
        self.keep_alive = keep_alive
        self.scope: dict[str, Any] = {"state": {}}
        self.message_event = asyncio.Event()


class Http(HttpToolsProtocol):
    """A connection of HTTP/1.1.

    It also ends the decode streams when the server stops, and one whose client leaves; uvicorn alone would go on.
    """

    cycle: RequestResponseCycle | _Turn | None  # type: ignore[assignment]
    _target: Target | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Behind proxies, another stands before it, and says who the client is.
        self._entry = self.app if isinstance(self.app, Entry) else None

    def on_headers_complete(self) -> None:
        """Choose who answers."""
        self._target = self._find() if self.cycle is None or self.cycle.response_complete else None
        if self._target is None:
            super().on_headers_complete()
            return
        self._parts: list[bytes] = []
        self.cycle = self._turn = _Turn(self.parser.should_keep_alive())

    def _find(self) -> Target | None:
        """Return what answers the request that has come, if it is to be answered here."""
        if self._entry is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        length = None
        for name, value in self.headers:
            if name == b"content-length":
                length = value
            elif name in ELSEWHERE:
                return None
        if length is None or len(length) > 6 or int(length) > LONGEST_BODY:
            return None
        return self._entry.target(self.url)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if self._target is None:
            super().on_body(body)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Answer, now that the body is there."""
        if self._target is None:
            super().on_message_complete()
            return
        self.scope["path"], self.scope["query_string"] = self._target.path, self._target.query
        arrival = Arrival(self.scope, _nothing, b"".join(self._parts))  # type: ignore[arg-type]
        drive(self._answer(arrival, self._target, self._turn), copy_context(), self.tasks)

    async def _answer(self, arrival: Arrival, target: Target, turn: _Turn) -> None:
        transport, entry = self.transport, self._entry
        assert entry is not None
        try:
            await self._send(await entry.answer(arrival, target), turn)
        except Exception:  # the answer may have begun
            LOG.exception("an answer was broken off")
            transport.abort()
        if transport.is_closing():
            return
        turn.response_complete = True
        if not turn.keep_alive:
            transport.close()
        self.on_response_complete()

    async def _send(self, response: Response, turn: _Turn) -> None:
        """Write an answer, as fast as the client takes it."""
        transport = self.transport
        head = [STATUS_LINE[response.status_code]]
        for name, value in (*self.server_state.default_headers, *response.raw_headers):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n" if turn.keep_alive else b"connection: close\r\n\r\n")
        if not isinstance(response, Reply):
            transport.write(b"".join((*head, response.body)))
        elif response.small:
            transport.writelines((b"".join(head), *response.content()))
        else:
            transport.write(b"".join(head))
            async for packet in response.packets():
                transport.write(packet)
                if self.flow.write_paused:
                    await self.flow.drain()
                if transport.is_closing():
                    return

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream that the connection was."""
        super().connection_lost(exc)
        if self.cycle is not None and (lifetime := self.cycle.scope["state"].get(LIFETIME)):
            lifetime.end("left")

    def shutdown(self) -> None:
        """End the streams."""
        super().shutdown()
        self.app_state["streams"].drain()


class WebSocket(WebSocketsSansIOProtocol):
    """A WebSocket, whose decode stream may say where it is before it is closed."""

    def shutdown(self) -> None:
        """Let the stream close the connection; without one, close it."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        self.app_state["streams"].drain()
