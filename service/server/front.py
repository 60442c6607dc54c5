"""The HTTP/1.1 connection of a client: it orders responses, answers tensor requests, and hands all others to ASGI."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, cast

from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.context import RequestContext, find_request_id
from preblock.service.server.coroutines import run_eagerly
from preblock.service.server.deadline import Deadline
from preblock.service.server.descriptor_reserve import DescriptorReserve, WaitingConnection
from preblock.service.server.incoming_request import IncomingRequest, Refusal
from preblock.service.server.lingering_close import LingeringClose
from preblock.service.server.read_scheduler import ReadScheduler, ReadTurns
from preblock.service.server.request_reader import MALFORMED, RequestReader
from preblock.service.server.tensor_path import TensorPath
from preblock.service.server.tensor_responder import error_response
from preblock.service.server.unread_watch import UnreadWatch
from preblock.service.server.uvicorn_bridge import Config, ServerState, UvicornBridge, connections_of
from preblock.service.server.websocket import WebSocket

LOG = logging.getLogger(__name__)


class Front(WaitingConnection):
    """One HTTP/1.1 connection. Its responses have the order of the requests, for any segments of the input.

    Args:
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application: `settings`, and, if it has them, `streams` and the memory of large bodies and
            responses.

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
        self._watch: UnreadWatch = None  # type: ignore[assignment]
        self.client: tuple[str, int] | None = None
        self.scheme = "http"
        self.keep_alive = True
        self.write_paused = False
        self._closing = False
        self.active: IncomingRequest | None = None
        self._queue: deque[IncomingRequest] = deque()
        self.writable = asyncio.Event()
        self.writable.set()
        self._context = Context()
        self.deadline = Deadline(self.loop)
        self.reader = RequestReader(self)
        self.tensors = TensorPath(self, config.loaded_app)
        self._bridge: UvicornBridge | None = None  # most connections for tensors need none

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self.transport = transport
        self._context = copy_context()
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        turns, reader = ReadTurns.of(self.app_state, self.loop), self.reader
        self.scheduler = ReadScheduler(transport, turns, reader.read, lambda: reader.body_bytes, self.fail)
        self._watch = UnreadWatch(transport, self.loop, self.app_state, self._count_held)
        self._connections.add(self)
        self.reader.wait_for_head()
        if self.scheme == "http":  # else its handshake has reported it
            socket = transport.get_extra_info("socket")
            DescriptorReserve.of(self.app_state, self.loop, self._connections).admit(socket.fileno())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio passes it
        """End all requests of the connection."""
        self._closing = True
        self._connections.discard(self)
        self.deadline.cancel()
        self.resume_writing()
        if self._bridge is not None:
            self._bridge.connection_lost()
        self.scheduler.end()

    def _count_held(self) -> int:
        """Return the bytes of memory that the response in progress holds."""
        return self.tensors.held + (0 if self._bridge is None else self._bridge.held)

    def pause_writing(self) -> None:
        """Pause responses, because the client does not read."""
        self.write_paused = True
        self.writable.clear()
        self._watch.start()
        if self._bridge is not None:
            self._bridge.pause_writing()

    def resume_writing(self) -> None:
        """Resume responses."""
        self.write_paused = False
        self.writable.set()
        self._watch.stop()
        if self._bridge is not None:
            self._bridge.resume_writing()

    def shutdown(self) -> None:
        """End the streams, and close the connection. A request with a complete head is still answered."""
        self.scheduler.feed(self.tensors.take_held_head())
        self.scheduler.read_chunk()  # a head may wait for its turn
        if self.active is None:
            self.transport.close()
        else:
            self.keep_alive = False
            if self._bridge is not None:
                self._bridge.shutdown()
        if streams := self.app_state.get("streams"):
            streams.drain()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._closing or self.transport.is_closing()

    @property
    def settings(self) -> Settings:
        """The current settings."""
        live: LiveSettings = self.app_state["settings"]
        return live.current

    def waits_since(self) -> tuple[bool, float] | None:
        """Return whether the connection is idle, and since when; None if it does not wait for its client."""
        active = self.active
        answers = active is not None and not active.answered and (active.complete or self.answer_begun)
        if not self.deadline.is_set() or answers or self.delays_input() or self.is_closing():
            return None
        return self.deadline.is_set(self._close_idle), self.deadline.since

    def abort(self) -> None:
        """Close the connection at once, without a response."""
        self._closing = True
        self.transport.abort()

    def _close_idle(self) -> None:
        self.transport.close()

    @property
    def answer_begun(self) -> bool:
        """Whether a part of the response to the active request was written."""
        active = self.active
        return active is not None and (active.answer_begun or (self._bridge is not None and self._bridge.answer_begun))

    def delays_input(self) -> bool:
        """Return whether input waits for the server, not for the client."""
        return self.scheduler.paused or bool(self.scheduler.rest)

    def close(self) -> None:
        """Close the connection after the responses written so far; the client may still be sending."""
        if not self.is_closing():
            self._closing = True
            LingeringClose(self.transport, self.loop, self._connections)
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        """Read input, unless it is a request with the known head."""
        try:
            rest = self.tensors.answer_repeated(data)
        except Exception:
            self.fail()
        else:
            if rest:
                self.scheduler.feed(rest)

    def guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Call a step for the active request; an unexpected exception ends this connection only."""
        try:
            step(*arguments)
        except Exception:
            self.fail()

    def fail(self) -> None:
        """Log the current exception. Answer its request with status 500, or reset the connection within a response."""
        active = self.active
        context = RequestContext(None if active is None else find_request_id(active.identifying))
        LOG.exception("internal error in a connection; it is closed", extra={"request_id": context.text})
        if active is None or self.answer_begun or self.is_closing():
            self.transport.abort()
            return
        self.keep_alive = False
        self.tensors.send_internal_error(active, context)
        self.close()

    def accept(self, incoming: IncomingRequest) -> None:
        """Start a request, or queue it behind earlier ones."""
        incoming.accepted = True
        if self.is_closing():  # the last response closes the connection; the rest of the input is not answered
            return
        if self.active is None and not self._queue:
            self._start(incoming)
        else:
            self._queue.append(incoming)
            self.scheduler.pause()

    def receive_body(self, incoming: IncomingRequest, body: bytes) -> None:
        """Forward a chunk of a request body, or keep it until the request starts."""
        if incoming is self.active and incoming.route is None and self._bridge is not None:
            self._bridge.send_body(body)
        else:
            incoming.chunks.append(body)

    def complete(self, incoming: IncomingRequest, first_input: bytes) -> None:
        """Answer a tensor request, or forward the end of its body.

        Args:
            incoming: the request, complete.
            first_input: the first bytes received for it; empty if they are not kept.

        """
        if incoming is self.active and incoming.route is None and self._bridge is not None:
            self._bridge.send_end()
            if incoming.answered:
                self.finish()
        elif incoming is self.active:
            self.tensors.answer(incoming, first_input)

    def cut_body(self, incoming: IncomingRequest) -> None:
        """End the body of a request before its malformed or late rest, and close the connection after its response.

        The request is answered if its response does not depend on the rest; otherwise the refusal is its response.
        """
        self.scheduler.pause()
        if incoming.answered:
            self.close()
        elif incoming is self.active and incoming.route is None and self._bridge is not None:
            self._bridge.cut_body()
        elif incoming is self.active and incoming.refusal is not None:
            self._send_refusal(incoming.refusal)

    def _start(self, incoming: IncomingRequest) -> None:
        self.active = incoming
        if incoming.refusal is not None and not incoming.method:
            self._send_refusal(incoming.refusal)
            return
        if incoming.is_websocket:
            self._upgrade(incoming)
            return
        self.keep_alive = incoming.keep_alive and self.keep_alive
        if self.tensors.accepts(incoming):
            if incoming.complete:
                self.tensors.answer(incoming, b"")
        elif not self._begin(incoming):
            self._send_refusal(MALFORMED)

    def _begin(self, incoming: IncomingRequest) -> bool:
        """Start the application for a request; return False if its URL is malformed."""
        if self._bridge is None:
            self._bridge = UvicornBridge(self, self.config, self.server_state, self.app_state, self._context)
            if self.write_paused:
                self._bridge.pause_writing()
        return self._bridge.begin(incoming)

    def finish(self) -> None:
        """End the active request after its response, and start the next one."""
        if self.is_closing():
            return
        active = self.active
        if active is not None and active.refusal is not None:  # its body is malformed
            if active.answer_begun:
                self.close()
            else:
                self._send_refusal(active.refusal)
            return
        if active is not None and not active.complete:  # the rest of its body is still unread
            active.answered = True
            self.reader.wait_for_body()
            return
        if self.write_paused:  # hold back a client that does not read
            run_eagerly(self._finish_when_read(), self._context.copy(), self.tasks, self.fail)
            return
        self.server_state.total_requests += 1
        self.active = None
        if not self.keep_alive:
            self.close()
        elif self._queue:
            self.loop.call_soon(self.guard, self._start_next, context=self._context)
        else:
            if self.reader.between_requests:
                self.deadline.set(self.config.timeout_keep_alive, self._close_idle)
            else:  # a part of the next head has arrived
                self.reader.wait_for_head()
            self.resume_reading()

    async def _finish_when_read(self) -> None:
        await self.writable.wait()
        self.finish()

    def _start_next(self) -> None:
        if not self.is_closing() and self.active is None and self._queue:
            self._start(self._queue.popleft())
            self.resume_reading()

    def pause_reading(self) -> None:
        """Read no more of the input, because the application has not taken the body so far."""
        self.scheduler.pause()

    def resume_reading(self) -> None:
        """Resume reading, unless requests are queued or none can follow."""
        if not self._queue and not self.reader.ended:
            self.scheduler.resume()

    def _send_refusal(self, refusal: Refusal) -> None:
        self.transport.write(error_response(refusal, self.server_state.default_headers))
        self.close()

    def _upgrade(self, incoming: IncomingRequest) -> None:
        """Switch to WebSocket."""
        rest = incoming.rest + self.scheduler.end()
        self.connection_lost(None)
        socket = WebSocket(self.transport, self.config, self.server_state, self.app_state, self.loop)
        socket.open(incoming.head_of_websocket(), rest)
