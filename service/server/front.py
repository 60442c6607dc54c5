"""The HTTP/1.1 connection of a client: it frames requests, answers tensor requests, and forwards all others.

A contained protocol of uvicorn answers the others. It reads requests serialized from the parsed ones, so both parsers
always agree on the end of a request.
"""

import asyncio
import logging
from collections import deque
from contextvars import Context, copy_context
from typing import Any, cast

import httptools

from preblock.service.observability.context import PER_REQUEST_HEADERS
from preblock.service.server.coroutines import run_eagerly
from preblock.service.server.deadline import Deadline
from preblock.service.server.handover import Handover
from preblock.service.server.incoming_request import IncomingRequest
from preblock.service.server.read_scheduler import CHUNK_BYTES, ReadScheduler
from preblock.service.server.tensor_path import TensorPath
from preblock.service.server.tensor_responder import error_response
from preblock.service.server.uvicorn_adapter import Config, ServerState, connections_of
from preblock.service.server.websocket import WebSocket

LOG = logging.getLogger(__name__)
MAX_HEAD_BYTES = 2**16  # of first line and headers, and of the trailers of a chunked body
TOO_LONG = f"headers: got more than {MAX_HEAD_BYTES} bytes, expected at most {MAX_HEAD_BYTES} bytes"


class Front(asyncio.Protocol):
    """One HTTP/1.1 connection, with limits for the size and the time of request heads.

    Args:
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application: `settings`, and `streams` if it has any.

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
        self.between_requests = True  # no byte of the next request has arrived
        self.incomplete_bytes = 0  # bytes since the last complete head, body chunk or request
        self.active: IncomingRequest | None = None
        self._incoming = IncomingRequest(0.0)
        self._first_input = b""  # first bytes received for the incoming request, if at most CHUNK_BYTES
        self._queue: deque[IncomingRequest] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.writable = asyncio.Event()
        self.writable.set()
        self._context = Context()
        self.deadline = Deadline(self.loop)
        self._tensors = TensorPath(self, config.loaded_app)
        self._handover = Handover(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
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
        self.deadline.cancel()
        self.resume_writing()
        self._handover.connection_lost(exc)
        self.scheduler.end()

    def pause_writing(self) -> None:
        """Pause responses, because the client does not read."""
        self.write_paused = True
        self.writable.clear()
        self._handover.pause_writing()

    def resume_writing(self) -> None:
        """Resume responses."""
        self.write_paused = False
        self.writable.set()
        self._handover.resume_writing()

    def shutdown(self) -> None:
        """End the streams, and close the connection. A request with a complete head is still answered."""
        self._read(self._tensors.held_head())
        if self.active is None:
            self.transport.close()
        else:
            self.keep_alive = False
        if streams := self.app_state.get("streams"):
            streams.drain()

    def _wait_for_head(self) -> None:
        self.deadline.set(self.app_state["settings"].current.header_timeout_seconds, self._refuse_late)

    def _refuse_late(self) -> None:
        self.refuse(408, "the request did not arrive in time")

    def data_received(self, data: bytes) -> None:
        """Read input, unless it is a request with the known head."""
        rest = self._tensors.answer_repeated(data)
        if rest:
            self.scheduler.feed(rest)

    def _read(self, data: bytes) -> None:
        if self.between_requests:
            self._first_input = data if len(data) <= CHUNK_BYTES else b""
        self.incomplete_bytes += len(data)
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._incoming.is_websocket:
                    self._upgrade(data)
                    return
            except httptools.HttpParserError:
                LOG.warning("Invalid HTTP request received.")
                self.refuse(400, "Invalid HTTP request received.")
                return
        if self.incomplete_bytes > MAX_HEAD_BYTES:
            self.refuse(431, TOO_LONG)
        elif self.incomplete_bytes and not self.deadline.is_set(self._refuse_late):
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.between_requests = False
        self._incoming = IncomingRequest(self._tensors.pop_start_time())

    def on_url(self, url: bytes) -> None:
        """Read a part of the URL."""
        self._incoming.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header. Headers for the request's identity are kept apart."""
        lower = name.lower()
        if lower in PER_REQUEST_HEADERS:
            self._incoming.identifying.append((lower, value))
        else:
            self._incoming.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the response, or queue the request behind earlier ones."""
        incoming = self._incoming
        self.deadline.clear()
        if self.incomplete_bytes > MAX_HEAD_BYTES and incoming.head_size > MAX_HEAD_BYTES:
            self.refuse(431, TOO_LONG)
            raise httptools.HttpParserError(TOO_LONG)
        self.incomplete_bytes = 0
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
        """Read a chunk of the body."""
        self.incomplete_bytes = 0
        incoming = self._incoming
        if incoming is self.active and incoming.route is None:
            if incoming.answered:
                self.deadline.clear()  # the client still sends the body, and would miss the response
            self._handover.send_body(incoming, body)
        else:
            incoming.chunks.append(body)

    def on_message_complete(self) -> None:
        """Answer a tensor request, or forward the end of its body."""
        self.incomplete_bytes, self.between_requests = 0, True
        incoming, first_input, self._first_input = self._incoming, self._first_input, b""
        incoming.complete = True
        if incoming is self.active and incoming.route is None:
            self._handover.send_end(incoming)
            if incoming.answered:
                self.finish()
        elif incoming is self.active:
            self._tensors.answer(incoming, first_input)

    def _start(self, incoming: IncomingRequest) -> None:
        self.active = incoming
        self.keep_alive = incoming.keep_alive and self.keep_alive
        if self._tensors.accepts(incoming):
            if incoming.complete:
                self._tensors.answer(incoming, b"")
        else:
            self._handover.begin(incoming)

    def finish(self) -> None:
        """End the active request after its response, and start the next one."""
        if self.transport.is_closing():
            return
        active = self.active
        if active is not None and not active.complete:  # the rest of its body is still unread
            active.answered = True
            self.deadline.set(self.config.timeout_keep_alive, self.transport.close)
            return
        if self.write_paused:  # hold back a client that does not read
            run_eagerly(self._finish_when_read(), self._context.copy(), self.tasks)
            return
        self.server_state.total_requests += 1
        self.active = None
        if not self.keep_alive:
            self.transport.close()
        elif self._queue:
            self.loop.call_soon(self._start_next, context=self._context)
        else:
            if self.between_requests:
                self.deadline.set(self.config.timeout_keep_alive, self.transport.close)
            else:  # a part of the next head has arrived
                self._wait_for_head()
            self.resume_reading()

    async def _finish_when_read(self) -> None:
        await self.writable.wait()
        self.finish()

    def _start_next(self) -> None:
        if not self.transport.is_closing() and self.active is None and self._queue:
            self._start(self._queue.popleft())
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless requests are queued."""
        if not self._queue:
            self.scheduler.resume()

    def refuse(self, status: int, text: str) -> None:
        """Answer malformed input and close the connection, but never within or before another response."""
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
            self.transport.write(error_response(status, text, self.server_state.default_headers))
            self.transport.close()

    def _upgrade(self, rest: bytes) -> None:
        """Switch to WebSocket, unless the response to another request is pending."""
        incoming = self._incoming
        if self.active is not None or self._queue or not incoming.url.isascii():
            self.refuse(400, "WebSocket upgrade rejected: another request is pending, or the path is not ASCII")
            return
        rest += self.scheduler.end()
        self.connection_lost(None)
        socket = WebSocket(self.transport, self.config, self.server_state, self.app_state, self.loop)
        socket.open(incoming.head(), rest)
