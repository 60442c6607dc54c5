"""The HTTP/1.1 connection of a client: it reads requests, orders responses, and limits the time of both.

`RequestReader` parses each request once. The connection answers requests for tensors itself (`tensor_requests.py`),
and hands all others to the application (`uvicorn_bridge.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, cast

import httptools

from preblock.service.core.settings import LiveSettings
from preblock.service.core.tasks import run_eagerly
from preblock.service.observability.context import RequestContext, find_request_id
from preblock.service.server.descriptor_reserve import WaitingConnection
from preblock.service.server.incoming_request import HEAD_TOO_LONG, LINE_BYTES, MAX_HEAD_BYTES, IncomingRequest, Refusal
from preblock.service.server.lingering_close import LingeringClose
from preblock.service.server.read_scheduler import CHUNK_BYTES, ReadScheduler
from preblock.service.server.tensor_requests import TensorRequests
from preblock.service.server.unread_watch import UnreadWatch
from preblock.service.server.uvicorn_bridge import Client, Shared, UvicornBridge
from preblock.service.server.websocket import WebSocket

LOG = logging.getLogger(__name__)
NEVER = float("inf")
MAX_INCOMPLETE_BYTES = 2 * MAX_HEAD_BYTES
"""Limit of raw input without a complete head or chunk. The limit of a head itself holds for any segments of input."""
MALFORMED = Refusal(400, "the request is not valid HTTP/1.1")
TOO_LONG = Refusal(431, HEAD_TOO_LONG)
TOO_LATE = Refusal(408, "the request did not arrive in time")
MIN_BODY_BYTES_PER_SECOND = 500
"""A slower body is late, even without a long pause. Apache's `mod_reqtimeout` has the same default."""
MAX_ANSWERED_BODY_SECONDS = 5
"""Longest pause in the body of an answered request, whose client would miss the response after a close."""
NO_REQUEST = IncomingRequest(0.0)
"""Stands between two requests, so that an idle connection keeps no headers."""


class Deadline:
    """One timer for many deadlines. The timer seldom moves, because nearly all deadlines are cleared in time.

    Args:
        loop: of the connection.

    Attributes:
        since: time when the deadline was last set or moved, on the clock of the loop.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.since = self._time = NEVER
        self._action: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`, unless the deadline is set again or cleared before."""
        self.since = self._loop.time()
        self._time, self._action = self.since + seconds, action
        if self._timer is not None and self._timer.when() > self._time:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._time, self._check)

    def extend(self, seconds: float, most: float) -> None:
        """Move the deadline by `seconds`, but to at most `most` seconds from now."""
        if self._action is not None:
            self.set(min(self._time - self._loop.time() + seconds, most), self._action)

    def is_set(self, action: Callable[[], None] | None = None) -> bool:
        """Return whether the deadline is set, with this action if one is given."""
        return self._time != NEVER and action in (None, self._action)

    def clear(self) -> None:
        """Do nothing until the deadline is set again."""
        self._time = NEVER

    def cancel(self) -> None:
        """Clear the deadline, and release the timer."""
        self._time = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._time == NEVER or self._action is None:
            return
        if self._loop.time() < self._time:
            self._timer = self._loop.call_at(self._time, self._check)
        else:
            self._time = NEVER
            self._action()


class RequestReader:
    """Parses the input of a connection, and passes requests, bodies and refusals to it.

    Args:
        connection: of the client.
        settings: limits of time.
        deadline: of the connection.

    Attributes:
        between_requests: whether no byte of the next request has arrived.
        incomplete_bytes: bytes since the last complete head, body chunk or request.
        body_bytes: bytes received of an incomplete body.
        ended: whether no request follows: the input is malformed, or belongs to a WebSocket.

    """

    def __init__(self, connection: "HttpConnection", settings: LiveSettings, deadline: Deadline) -> None:
        self._connection, self._settings, self.deadline = connection, settings, deadline
        self.between_requests = True
        self.incomplete_bytes = self.body_bytes = 0
        self.ended = False
        self._incoming = NO_REQUEST
        self._first_input = b""  # first bytes received for the incoming request, if at most CHUNK_BYTES
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # The check of the head refuses a body with a length and chunks, and names both headers.
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_chunked_length=True)
        return parser

    def wait_for_head(self) -> None:
        """Set the deadline for the next head."""
        self.deadline.set(self._settings.current.header_timeout_seconds, self.refuse_late)

    def wait_for_body(self, received: int = 0) -> None:
        """Set the deadline for more of the body, after `received` bytes.

        A body may pause for `body_timeout_seconds`, and each byte adds its time at the minimum rate. So a short pause
        does no harm, and bytes at long intervals do not hold a connection.
        """
        seconds = self._settings.current.body_timeout_seconds
        if self._incoming.answered:
            seconds = min(seconds, MAX_ANSWERED_BODY_SECONDS)
        if self.deadline.is_set(self._check_body):
            self.deadline.extend(received / MIN_BODY_BYTES_PER_SECOND, seconds)
        else:
            self.deadline.set(seconds, self._check_body)

    def _check_body(self) -> None:
        """Refuse a late body, unless it waits for the server, or belongs to a stream with limits of its own."""
        if self._connection.delays_input():
            self.wait_for_body()
        elif self._incoming.answered or not self._connection.has_begun():  # only a stream answers before the body ends
            self.refuse_late()

    def refuse_late(self) -> None:
        """Refuse the incomplete request."""
        self._refuse(TOO_LATE)

    def read(self, data: bytes) -> None:
        """Read the next segment of the input."""
        if self.between_requests:
            self._first_input = data if len(data) <= CHUNK_BYTES else b""
        size = len(data)
        self.incomplete_bytes += size
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._incoming.is_websocket:
                    self._incoming.rest, self.ended = data, True
                    self._connection.accept(self._incoming)
                    return
                if self._incoming.offers_other_protocol:
                    # The parser has skipped the body. A server may ignore the offer (RFC 9110, section 7.8).
                    self._parser, data = self._new_parser(), self._incoming.head_without_upgrade() + data
            except httptools.HttpParserCallbackError:
                if not self.ended:  # else the callback has refused the request
                    raise
                return
            except httptools.HttpParserError:
                self._refuse(MALFORMED)
                return
        if self.between_requests and not self.incomplete_bytes:
            return
        if self.incomplete_bytes > MAX_INCOMPLETE_BYTES:
            self._refuse(TOO_LONG)
        elif self._connection.is_closing():
            return
        elif self._incoming.accepted and not self._incoming.complete:
            self.wait_for_body(size)
        elif self.incomplete_bytes and not self.deadline.is_set(self.refuse_late):
            self.wait_for_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.between_requests = False
        before = self._incoming
        is_repeated = before.upgrades and before.offers_other_protocol  # the same head, without its offer
        self._incoming = IncomingRequest(before.began if is_repeated else self._connection.pop_start_time())

    def on_url(self, url: bytes) -> None:
        """Read a part of the URL."""
        self._incoming.url += url
        self._incoming.size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header; count and ignore a trailer."""
        incoming = self._incoming
        incoming.size += len(name) + len(value) + LINE_BYTES
        if not incoming.accepted:
            incoming.add_header(name, value)
        elif incoming.size > MAX_HEAD_BYTES:
            self._stop(TOO_LONG)

    def on_headers_complete(self) -> None:
        """Check the head, and pass the request on: a WebSocket after its end, another offer when it is read again."""
        incoming = self._incoming
        self.deadline.clear()
        self.incomplete_bytes = 0
        incoming.method = self._parser.get_method()
        incoming.version = self._parser.get_http_version()
        incoming.keep_alive = self._parser.should_keep_alive() and incoming.has_sure_end
        incoming.upgrades = self._parser.should_upgrade()
        incoming.use_origin_form()
        refusal = incoming.check_head()
        if refusal is not None:
            self._stop(refusal)
        incoming.size = 0
        if not incoming.upgrades or not (incoming.is_websocket or incoming.offers_other_protocol):
            self._connection.accept(incoming)

    def on_body(self, body: bytes) -> None:
        """Read a chunk of the body."""
        self.incomplete_bytes = 0
        self.body_bytes += len(body)
        self._connection.receive_body(self._incoming, body)

    def on_message_complete(self) -> None:
        """Read the end of a request."""
        incoming = self._incoming
        if incoming.upgrades and incoming.offers_other_protocol:
            return
        self.deadline.clear()
        self.incomplete_bytes = self.body_bytes = 0
        self.between_requests = True
        if not incoming.upgrades:  # else the parser reports the upgrade next
            self._incoming = NO_REQUEST
        first_input, self._first_input = self._first_input, b""
        incoming.complete = True
        self._connection.complete(incoming, first_input)

    def _stop(self, refusal: Refusal) -> None:
        """Refuse the input from a callback of the parser."""
        self._refuse(refusal)
        raise httptools.HttpParserError(refusal.text)

    def _refuse(self, refusal: Refusal) -> None:
        """Read no more input, and pass a refusal to the connection."""
        if self.ended or self._connection.is_closing():
            return
        self.ended = True
        self.deadline.clear()
        incoming = self._incoming
        if not incoming.accepted or incoming.complete:
            self._connection.accept(IncomingRequest(0.0, refusal=refusal))
        else:
            incoming.refusal = refusal
            self._connection.cut_body(incoming)


class HttpConnection(WaitingConnection):
    """One HTTP/1.1 connection. Its responses have the order of the requests, for any segments of the input.

    Args:
        shared: what the connections of the server share.

    Attributes:
        client: of the connection, once it is made.
        active: the request whose response comes next; None between requests.
        keep_alive: whether another request may follow the active one.
        writable: set unless the client does not read.

    """

    client: Client
    _reader: RequestReader
    _scheduler: ReadScheduler
    _watch: UnreadWatch
    _tensors: TensorRequests

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.active: IncomingRequest | None = None
        self.keep_alive = True
        self.writable = asyncio.Event()
        self.writable.set()
        self._closing = False
        self._queue: deque[IncomingRequest] = deque()
        self._bridge: UvicornBridge | None = None  # most connections for tensors need none

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        shared, peer = self.shared, transport.get_extra_info("peername")
        address = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.client = Client(transport, address, scheme, copy_context())
        self._reader = reader = RequestReader(self, shared.services.settings, Deadline(shared.loop))
        self._tensors = TensorRequests(self, shared, self.client)
        self._scheduler = ReadScheduler(transport, shared.turns, reader.read, lambda: reader.body_bytes, self.fail)
        self._watch = UnreadWatch(transport, shared.loop, shared.services, self._count_held)
        shared.connections.add(self)
        reader.wait_for_head()
        if scheme == "http":  # else its handshake has reported it
            shared.reserve.admit(transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio passes it
        """End all requests of the connection."""
        self._closing = True
        self.shared.connections.discard(self)
        self._reader.deadline.cancel()
        self.resume_writing()
        if self._bridge is not None:
            self._bridge.connection_lost()
        self._scheduler.end()

    def _count_held(self) -> int:
        """Return the bytes of memory that the response in progress holds."""
        return self._tensors.held + (0 if self._bridge is None else self._bridge.held)

    def pause_writing(self) -> None:
        """Pause responses, because the client does not read."""
        self.writable.clear()
        self._watch.start()
        if self._bridge is not None:
            self._bridge.pause_writing()

    def resume_writing(self) -> None:
        """Resume responses."""
        self.writable.set()
        self._watch.stop()
        if self._bridge is not None:
            self._bridge.resume_writing()

    def shutdown(self) -> None:
        """End the streams, and close the connection. A request with a complete head is still answered."""
        self._scheduler.feed(self._tensors.take_held_head())
        self._scheduler.read_chunk()  # a head may wait for its turn
        if self.active is None and not self._queue:
            self.client.transport.close()
        else:
            self.keep_alive = False
            if self._bridge is not None:
                self._bridge.shutdown()
        if self.shared.services.streams is not None:
            self.shared.services.streams.drain()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._closing or self.client.transport.is_closing()

    def waits_since(self) -> tuple[bool, float] | None:
        """Return whether the connection is idle, and since when; None if it does not wait for its client."""
        active, deadline = self.active, self._reader.deadline
        answers = active is not None and not active.answered and (active.complete or self.has_begun())
        if not deadline.is_set() or answers or self.delays_input() or self.is_closing():
            return None
        return deadline.is_set(self._close_idle), deadline.since

    def abort(self) -> None:
        """Close the connection at once, without a response."""
        self._closing = True
        self.client.transport.abort()

    def _close_idle(self) -> None:
        self.client.transport.close()

    def close(self) -> None:
        """Close the connection after the responses written so far; the client may still be sending."""
        if not self.is_closing():
            self._closing = True
            LingeringClose(self.client.transport, self.shared.loop, self.shared.connections)
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        """Read input, unless it is a request with the known head."""
        try:
            rest = self._tensors.answer_repeated(data)
        except Exception:
            self.fail()
        else:
            if rest:
                self._scheduler.feed(rest)

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
        if active is None or self.has_begun() or self.is_closing():
            self.client.transport.abort()
            return
        self.keep_alive = False
        self._tensors.send_internal_error(active, context)
        self.close()

    def delays_input(self) -> bool:
        """Return whether input waits for the server, not for the client."""
        return self._scheduler.paused or bool(self._scheduler.rest)

    def has_begun(self) -> bool:
        """Return whether a part of the response to the active request was written."""
        active = self.active
        return active is not None and (active.answer_begun or (self._bridge is not None and self._bridge.has_begun))

    def _is_between_requests(self) -> bool:
        """Return whether no request is in progress, and no input of one has arrived."""
        reader, idle = self._reader, self.active is None and not self._scheduler.rest
        return idle and reader.between_requests and not reader.incomplete_bytes

    def hold(self) -> bool:
        """Wait for the body after a held head; return False unless the head is the next input."""
        if not self._is_between_requests():
            return False
        self._reader.deadline.set(self.shared.services.settings.current.body_timeout_seconds, self._refuse_held)
        return True

    def _refuse_held(self) -> None:
        """Refuse a held head, whose body is late."""
        self._reader.read(self._tensors.take_held_head())
        self._reader.refuse_late()

    def begin_repeated(self, incoming: IncomingRequest) -> bool:
        """Make a complete request with the known head the active one; return False unless it is the next input."""
        if not self._is_between_requests():
            return False
        self._reader.deadline.clear()
        self.active, incoming.answer_begun = incoming, False
        return True

    def pop_start_time(self) -> float:
        """Return the arrival time of the next request."""
        return self._tensors.pop_start_time()

    def accept(self, incoming: IncomingRequest) -> None:
        """Start a request, or queue it behind earlier ones."""
        incoming.accepted = True
        if self.is_closing():  # the last response closes the connection; the rest of the input is not answered
            return
        if self.active is None and not self._queue:
            self._start(incoming)
        else:
            self._queue.append(incoming)
            self._scheduler.pause()

    def receive_body(self, incoming: IncomingRequest, body: bytes) -> None:
        """Forward a chunk of a request body, or keep it until the request starts."""
        if incoming is self.active and incoming.call is None and self._bridge is not None:
            self._bridge.send_body(body)
        else:
            incoming.chunks.append(body)

    def complete(self, incoming: IncomingRequest, first_input: bytes) -> None:
        """Answer a tensor request, or forward the end of its body. `first_input` is empty if it is not kept."""
        if incoming is not self.active:
            return
        if incoming.call is not None:
            self._tensors.answer(incoming, incoming.call, first_input)
        elif self._bridge is not None:
            self._bridge.send_end()
            if incoming.answered:
                self.finish()

    def cut_body(self, incoming: IncomingRequest) -> None:
        """End the body of a request before its malformed or late rest, and close the connection after its response.

        The request is answered if its response does not depend on the rest; otherwise the refusal is its response.
        """
        self._scheduler.pause()
        if incoming.answered:
            self.close()
        elif incoming is self.active and incoming.call is None and self._bridge is not None:
            self._bridge.cut_body()
        elif incoming is self.active and incoming.refusal is not None:
            self._send_refusal(incoming.refusal)

    def _start(self, incoming: IncomingRequest) -> None:
        self.active = incoming
        if incoming.refusal is not None and not incoming.method:
            self._send_refusal(incoming.refusal)
            return
        if incoming.upgrades and incoming.is_websocket:
            self._upgrade(incoming)
            return
        self.keep_alive = incoming.keep_alive and self.keep_alive
        incoming.call = self._tensors.prepare(incoming)
        if incoming.call is None:
            if self._bridge is None:
                self._bridge = UvicornBridge(self, self.shared, self.client)
            if not self._bridge.begin(incoming):
                self._send_refusal(MALFORMED)
        elif incoming.complete:
            self._tensors.answer(incoming, incoming.call, b"")

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
            self._reader.wait_for_body()
            return
        if not self.writable.is_set():  # hold back a client that does not read
            run_eagerly(self._finish_when_read(), self.client.context.copy(), self.shared.tasks, self.fail)
            return
        self.shared.server_state.total_requests += 1
        self.active = None
        if not self.keep_alive:
            self.close()
        elif self._queue:
            self.shared.loop.call_soon(self.guard, self._start_next, context=self.client.context)
        else:
            if self._reader.between_requests:
                self._reader.deadline.set(self.shared.config.timeout_keep_alive, self._close_idle)
            else:  # a part of the next head has arrived
                self._reader.wait_for_head()
            self.resume_reading()

    async def _finish_when_read(self) -> None:
        await self.writable.wait()
        self.finish()

    def _start_next(self) -> None:
        if not self.is_closing() and self.active is None and self._queue:
            self._start(self._queue.popleft())
            self.resume_reading()

    def pause_reading(self) -> None:
        """Read no more input, because the application has not taken the body so far."""
        self._scheduler.pause()

    def resume_reading(self) -> None:
        """Resume reading, unless requests are queued or none can follow."""
        if self._scheduler.paused and not self._queue and not self._reader.ended:
            self._scheduler.resume()

    def _send_refusal(self, refusal: Refusal) -> None:
        self.client.transport.write(refusal.response(self.shared.server_state.default_headers))
        self.close()

    def _upgrade(self, incoming: IncomingRequest) -> None:
        """Switch to WebSocket."""
        rest = incoming.rest + self._scheduler.end()
        self.connection_lost(None)
        WebSocket(self.shared, self.client).open(incoming.head_of_websocket(), rest)
