"""The HTTP/1.1 connection of a client: it frames requests, answers those for tensors, and hands on all others.

A contained protocol of uvicorn answers the others. It reads requests written anew from the parsed ones, so that both
always agree where a request ends.
"""

import asyncio
import logging
from collections import deque
from contextvars import Context, copy_context
from typing import Any, cast

import httptools

from preblock.service.api.http.response import Headers
from preblock.service.observability.context import PER_REQUEST_HEADERS
from preblock.service.server.coroutines import drive
from preblock.service.server.deadline import Deadline
from preblock.service.server.handover import Handover
from preblock.service.server.incoming_request import IncomingRequest
from preblock.service.server.read_scheduler import CHUNK_BYTES, ReadScheduler
from preblock.service.server.tensor_path import TensorPath
from preblock.service.server.tensor_responder import refusal
from preblock.service.server.uvicorn_adapter import Config, ServerState, connections_of
from preblock.service.server.websocket import WebSocket

LOG = logging.getLogger(__name__)
MAX_HEAD_BYTES = 2**16  # of the first line and the headers, and of the trailers of a chunked body
TOO_LONG = f"headers: got more than {MAX_HEAD_BYTES} bytes, allowed at most {MAX_HEAD_BYTES} bytes"


class Front(asyncio.Protocol):
    """One connection of HTTP/1.1, with limits for the size and the time of heads.

    Args:
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application: its `settings`, and its `streams` where it has any.

    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.config, self.server_state, self.app_state = config, server_state, app_state
        self.loop = _loop or asyncio.get_running_loop()
        self.tasks, self._connections = server_state.tasks, connections_of(server_state)
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.scheduler: ReadScheduler = None  # type: ignore[assignment]
        self.client: tuple[str, int] | None = None
        self.scheme = "http"
        self.keep_alive = True
        self.write_paused = False
        self.between = True  # two requests, without a byte of the second
        self.unfinished = 0  # bytes since a head, a part of a body or a whole request
        self.active: IncomingRequest | None = None
        self._incoming = IncomingRequest(0.0)
        self._came = b""  # the first input of the incoming request, unless it is long
        self._queue: deque[IncomingRequest] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._writable = asyncio.Event()
        self._writable.set()
        self._context = Context()
        self._deadline = Deadline(self.loop)
        self._tensors = TensorPath(self, config.loaded_app)
        self._handover = Handover(self)

    @property
    def default_headers(self) -> Headers:
        """The headers of every answer."""
        return self.server_state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.transport = transport
        self._context = copy_context()
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.scheduler = ReadScheduler(transport, self.loop, self._read)
        self._connections.add(self)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all requests of the connection."""
        self._connections.discard(self)
        self._deadline.cancel()
        self.write_paused = False
        self._writable.set()
        self._handover.connection_lost(exc)
        self.scheduler.end()

    def pause_writing(self) -> None:
        """Let answers wait, because the client does not read."""
        self.write_paused = True
        self._writable.clear()
        self._handover.pause_writing()

    def resume_writing(self) -> None:
        """Let answers go on."""
        self.write_paused = False
        self._writable.set()
        self._handover.resume_writing()

    async def drain(self) -> None:
        """Wait until the client has taken enough to write more."""
        await self._writable.wait()

    def shutdown(self) -> None:
        """End the streams, and close the connection; a request with a complete head is still answered."""
        self._read(self._tensors.take_held_head())
        if self.active is None:
            self.transport.close()
        else:
            self.keep_alive = False
        if streams := self.app_state.get("streams"):
            streams.drain()

    def _wait_for_head(self) -> None:
        self._deadline.set(self.app_state["settings"].current.header_timeout_seconds, self._refuse_late)

    def _refuse_late(self) -> None:
        self.refuse(408, "the request did not come")

    def has_come(self) -> None:
        """Forget the deadline: a head is complete."""
        self._deadline.clear()

    def data_received(self, data: bytes) -> None:
        """Read input, unless it is a request with the same head as the last."""
        rest = self._tensors.take(data)
        if rest:
            self.scheduler.feed(rest)

    def _read(self, data: bytes) -> None:
        if self.between:
            self._came = data if len(data) <= CHUNK_BYTES else b""
        self.unfinished += len(data)
        while data:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._incoming.is_websocket:
                    self._upgrade(data)
                    return
                continue
            except httptools.HttpParserError:
                LOG.warning("Invalid HTTP request received.")
                self.refuse(400, "Invalid HTTP request received.")
                return
            break
        if self.unfinished > MAX_HEAD_BYTES:
            self.refuse(431, TOO_LONG)
        elif self.unfinished and not self._deadline.is_set(self._refuse_late):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.between = False
        self._incoming = IncomingRequest(self._tensors.take_time())

    def on_url(self, url: bytes) -> None:
        """Read a part of the address."""
        self._incoming.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header. Headers that only identify the request are kept apart."""
        lower = name.lower()
        if lower in PER_REQUEST_HEADERS:
            self._incoming.passing.append((lower, value))
        else:
            self._incoming.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Begin to answer the request, or let it wait for its turn."""
        incoming = self._incoming
        self.has_come()
        if self.unfinished > MAX_HEAD_BYTES and incoming.head_size > MAX_HEAD_BYTES:
            self.refuse(431, TOO_LONG)
            raise httptools.HttpParserError(TOO_LONG)
        self.unfinished = 0
        incoming.method = self._parser.get_method()
        incoming.version = self._parser.get_http_version()
        incoming.keep_alive = self._parser.should_keep_alive()
        incoming.upgrades = self._parser.should_upgrade()
        if incoming.is_websocket:
            return
        if self.active is None and not self._queue:
            self._start(incoming)
        else:
            self._queue.append(incoming)
            self.scheduler.pause()

    def on_body(self, body: bytes) -> None:
        """Read a part of the body."""
        self.unfinished = 0
        incoming = self._incoming
        if incoming is self.active and incoming.target is None:
            if incoming.answered:
                self._deadline.clear()  # a client still sends a refused body: it would not see the answer
            self._handover.send_body(incoming, body)
        else:
            incoming.parts.append(body)

    def on_message_complete(self) -> None:
        """Answer a request for tensors: its body is complete."""
        self.unfinished, self.between = 0, True
        incoming, came, self._came = self._incoming, self._came, b""
        incoming.complete = True
        if incoming is self.active and incoming.target is None:
            self._handover.send_end(incoming)
            if incoming.answered:
                self.finish()
        elif incoming is self.active:
            self._tensors.answer(incoming, came)

    def _start(self, incoming: IncomingRequest) -> None:
        self.active = incoming
        self.keep_alive = incoming.keep_alive and self.keep_alive
        if self._tensors.accepts(incoming):
            if incoming.complete:
                self._tensors.answer(incoming, b"")
        else:
            self._handover.begin(incoming)

    def finish(self) -> None:
        """Go on to the next request, the answer being written."""
        if self.transport.is_closing():
            return
        active = self.active
        if active is not None and not active.complete:  # the rest of its body is still to be read
            active.answered = True
            self._deadline.set(self.config.timeout_keep_alive, self.transport.close)
            return
        if self.write_paused:  # hold back a client that does not read
            drive(self._finish_when_read(), self._context.copy(), self.tasks)
            return
        self.server_state.total_requests += 1
        self.active = None
        if not self.keep_alive:
            self.transport.close()
        elif self._queue:
            self.loop.call_soon(self._start_next, context=self._context)
        else:
            if self.between:
                self._deadline.set(self.config.timeout_keep_alive, self.transport.close)
            else:  # the next head has begun to come
                self._wait_for_head()
            self.resume_reading()

    async def _finish_when_read(self) -> None:
        await self.drain()
        self.finish()

    def _start_next(self) -> None:
        if not self.transport.is_closing() and self.active is None and self._queue:
            self._start(self._queue.popleft())
            self.resume_reading()

    def resume_reading(self) -> None:
        """Read on, unless requests wait for their turn."""
        if not self._queue:
            self.scheduler.resume()

    def refuse(self, status: int, text: str) -> None:
        """Answer broken input and close; write nothing within another answer or before it."""
        active = self.active
        if self.transport.is_closing():
            return
        if active is not None and (active.complete or active.answer_begun):
            self.keep_alive = False
            self._queue.clear()
            self.scheduler.pause()
            if active.answer_begun and not active.complete:
                self.transport.close()
        else:
            self.transport.write(refusal(status, text, self.default_headers))
            self.transport.close()

    def _upgrade(self, rest: bytes) -> None:
        """Become a WebSocket, unless the answer to another request has still to be sent."""
        incoming = self._incoming
        if self.active is not None or self._queue or not incoming.url.isascii():
            self.refuse(400, "an upgrade before the answer to another request, or with another path than ASCII")
            return
        rest += self.scheduler.end()
        self.connection_lost(None)
        socket = WebSocket(self.transport, self.config, self.server_state, self.app_state, self.loop)
        socket.open(incoming.head(), rest)
