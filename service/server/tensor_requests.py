"""Tensor requests, which the connection answers itself, without the tasks and messages of ASGI.

Those would cost as much as all other work for a small response. Clients often repeat a head byte for byte. Parsing it
takes a third of the time of a small response, so the connection remembers the last head.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from fastapi.responses import Response

from preblock.service.api.http import errors
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse, KnownHttpRequest, lines_of
from preblock.service.api.http.tracing import end_span, set_route, set_status, start_span
from preblock.service.api.prepared import PreparedRequests
from preblock.service.codecs.chunks import MIN_WRITE_BYTES, Buffer
from preblock.service.core.errors import PreblockError
from preblock.service.core.large_bodies import WriteTurns
from preblock.service.core.tasks import run_eagerly
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, Headers, RequestContext, find_request_id
from preblock.service.server.incoming_request import MAX_IDLE_HEAD_BYTES, STATUS_LINES, IncomingRequest, TensorCall
from preblock.service.server.uvicorn_bridge import Client, Shared

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 2**18
"""The application reads longer bodies: their responses take long anyway."""
APPLICATION_HEADERS = {
    *(b"expect", b"transfer-encoding", b"content-encoding", b"upgrade"),
    *(b"origin", b"sec-fetch-site"),  # it checks them
}
"""The application answers requests with these headers."""
CREDENTIAL, LENGTH = b"authorization", b"content-length"
"""Keys of prepared requests leave out the credential, because the cache outlives the connection."""
BEGIN = b"POST "
HEAD_END = b"\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class Connection(Protocol):
    """What tensor requests use of their connection."""

    active: IncomingRequest | None
    keep_alive: bool
    writable: asyncio.Event

    def hold(self) -> bool:
        """Wait for the body after a held head; return False unless the head is the next input."""

    def begin_repeated(self, incoming: IncomingRequest) -> bool:
        """Make a complete request with the known head the active one; return False unless it is the next input."""

    def finish(self) -> None:
        """End the active request after its response, and start the next one."""

    def guard(self, step: Callable[..., None], *arguments: Any) -> None:
        """Call a step for the active request; an unexpected exception ends this connection only."""

    def fail(self) -> None:
        """Handle the current exception."""


@dataclass(eq=False, slots=True)
class KnownHead:
    """Head of the last prepared request; the next request may begin with the same bytes.

    Args:
        data: bytes of the head.
        request_size: bytes of the head and the body.
        request: the request, without its body.
        call: what its head says.

    """

    data: bytes
    request_size: int
    request: IncomingRequest
    call: TensorCall


class TensorRequests:
    """Selects tensor requests, and passes them to the responder of the connection.

    Args:
        connection: of the client.
        shared: what the connections of the server share.
        client: of the connection.

    """

    def __init__(self, connection: Connection, shared: Shared, client: Client) -> None:
        self._connection, self._shared, self._client = connection, shared, client
        self._responder = TensorResponder(connection, shared, client)
        self._known: KnownHead | None = None
        self._held_head = b""  # a known head without its body; empty if none is held
        self._held_since = 0.0  # arrival of that head, until it is answered or parsed; else 0

    @property
    def held(self) -> int:
        """Bytes of memory that the response to the last tensor request holds."""
        return self._responder.held

    def answer_repeated(self, data: bytes) -> bytes:
        """Answer a request with the known head, or hold the head until its body arrives; return the remaining input."""
        known = self._known
        if known is None:
            return data
        if self._held_head:
            data = self.take_held_head() + data
        if data.startswith(known.data) and self._answer_known(known, data):
            return b""
        return data

    def pop_start_time(self) -> float:
        """Return the arrival time of the next request."""
        began, self._held_since = self._held_since or perf_counter(), 0.0
        return began

    def take_held_head(self) -> bytes:
        """Return the held head, and hold it no longer; empty if none is held."""
        head, self._held_head = self._held_head, b""
        return head

    def _answer_known(self, known: KnownHead, data: bytes) -> bool:
        connection, size, began = self._connection, len(data), self._held_since or perf_counter()
        if size != known.request_size:
            if size != len(known.data) or not connection.hold():
                return False
            self._held_head, self._held_since = known.data, began
            return True
        if not connection.begin_repeated(known.request):
            return False
        body = data[len(known.data) :]
        if self._answer_prepared(known.call, body, _context_of(known.call, body, began)):
            self._held_since = 0.0
            return True
        connection.active = None
        return False

    def prepare(self, request: IncomingRequest) -> TensorCall | None:
        """Return the call of a tensor request that the connection answers itself; None for any other request."""
        dispatcher = self._shared.dispatcher
        route = dispatcher.route(request.url) if request.method == b"POST" and request.version == "1.1" else None
        if route is None:
            return None
        client, scheme = self._shared.origin(self._client, request.identifying)
        key: Hashable = None
        key_changes, caller = 0, None
        if dispatcher.prepared is not None:
            # A route without a model takes texts, which vary in length.
            left_out = (CREDENTIAL,) if route.name else (CREDENTIAL, LENGTH)
            key = (request.url, *(header for header in request.headers if header[0] not in left_out))
            key_changes = dispatcher.access.changes
            caller = dispatcher.caller_context(request.headers, client)
        prepared = dispatcher.prepared if route.name and caller is not None else None
        if (prepared is None or key not in prepared) and not self._may_answer(request):
            return None
        identifying, target = request.identifying, ("POST", route.path, client[0] if client else "")
        request_id = find_request_id(identifying)
        return TensorCall(route, target, caller, key, key_changes, request_id, client, scheme, identifying)

    def _may_answer(self, request: IncomingRequest) -> bool:
        """Return whether the body is short, the host allowed, and no header belongs to the application.

        The key of a prepared request holds the host, so such a request needs no check.
        """
        headers = dict(request.headers)
        length = headers.get(b"content-length", b"")
        is_short = 0 < len(length) <= 6 and int(length) <= MAX_BODY_BYTES
        simple = is_short and headers.keys().isdisjoint(APPLICATION_HEADERS)
        return simple and self._shared.dispatcher.hosts.allow(headers.get(b"host"))

    def answer(self, request: IncomingRequest, call: TensorCall, first_input: bytes) -> None:
        """Answer a request with a complete body.

        Args:
            request: the request.
            call: what its head says.
            first_input: the first bytes received for it; empty if they are not kept.

        """
        body = b"".join(request.chunks)
        request.chunks = []
        context = _context_of(call, body, request.began)
        if self._answer_prepared(call, body, context):
            self._remember(request, call, first_input, len(body))
            return
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": call.route.path,
            "query_string": call.route.query,
            "headers": [*request.headers, *call.identifying],
            "client": call.client,
            "scheme": call.scheme,
        }
        self._responder.answer(RawRequest(scope, refuse_receive, body), call, context)

    def send_internal_error(self, request: IncomingRequest, context: RequestContext) -> None:
        """Answer a request with status 500."""
        path = request.url.partition(b"?")[0].decode("latin-1")
        self._responder.send_internal_error(path, context)

    def _answer_prepared(self, call: TensorCall, body: bytes, context: RequestContext) -> bool:
        """Answer a request that was prepared; return False without one, or if its caller needs a new check.

        It is found only now, because it would keep a replaced model open while the body arrives.
        """
        dispatcher = self._shared.dispatcher
        prepared = dispatcher.prepared
        if prepared is None or call.caller is None or dispatcher.access.changes != call.key_changes:
            return False
        # The copy keeps the request out of the variables of an idle connection.
        return call.caller.copy().run(self._responder.answer_prepared, prepared, call, body, context)

    def _remember(self, request: IncomingRequest, call: TensorCall, first_input: bytes, body_size: int) -> None:
        """Remember the head of a request that arrived alone, with its whole body or before it."""
        head, end, rest = first_input.partition(HEAD_END)
        # An empty line may precede a request; it ends no head.
        if end and head.startswith(BEGIN) and len(rest) in (0, body_size) and request.keep_alive:
            head += end
            if len(head) > MAX_IDLE_HEAD_BYTES:
                return
            self._known = KnownHead(head, len(head) + body_size, request, call)


def _context_of(call: TensorCall, body: bytes, began: float) -> RequestContext:
    """Return the context of a request with a complete body."""
    context = RequestContext(call.request_id, began)
    context.received, context.read, context.target = len(body), perf_counter() - began, call.target
    return context


async def refuse_receive() -> Any:
    """Stand in for the ASGI `receive` of a request with a complete body."""
    raise RuntimeError("the body was received already")


class TensorResponder:
    """Answers tensor requests, one at a time.

    Args:
        connection: of the client.
        shared: what the connections of the server share.
        client: of the connection.

    """

    def __init__(self, connection: Connection, shared: Shared, client: Client) -> None:
        self._connection, self._shared, self._client = connection, shared, client
        self._default_headers: Headers | None = None
        self._default_lines = b""
        self._context: RequestContext | None = None

    @property
    def held(self) -> int:
        """Bytes of memory that the response to the last request holds."""
        return 0 if self._context is None else self._context.held

    def answer_prepared(
        self,
        prepared: PreparedRequests[KnownHttpRequest],
        call: TensorCall,
        body: bytes,
        context: RequestContext,
    ) -> bool:
        """Answer a prepared request. Return False without one, or after a failed check, which `answer` then reports."""
        known = prepared.find(call.key)
        if known is None:
            return False
        CURRENT_REQUEST.set(context)
        run = known.start(body, context.began + context.read)
        if run is None:
            return False
        connection, self._context = self._connection, context
        try:
            self._begin_trace(call, context)
            if run.batched:
                self._shared.loop.call_soon(connection.guard, self._finish, known, run, context)
            elif run.streamed:
                work = self._answer_in_chunks(known, run, context)
                run_eagerly(work, copy_context(), self._shared.tasks, connection.fail)
            else:
                self._finish(known, run, context)
        except BaseException as error:
            run.end(error)
            self._release(context)
            raise
        return True

    def answer(self, raw: RawRequest, call: TensorCall, context: RequestContext) -> None:
        """Answer any other tensor request, without a task unless it has to wait."""
        self._context = context
        self._begin_trace(call, context)
        run_eagerly(self._answer(raw, call, context), copy_context(), self._shared.tasks, self._connection.fail)

    def _begin_trace(self, call: TensorCall, context: RequestContext) -> None:
        if (begin := self._shared.dispatcher.trace) is not None:
            trace = start_span(begin, context, "POST", call.route.path, call.scheme, call.identifying)
            set_route(trace, call.route.pattern)

    def _finish(self, known: KnownHttpRequest, run: FastRun, context: RequestContext) -> None:
        transport, began, size = self._client.transport, 0.0, 0
        try:
            lines, (length, content) = known.compute(run)
            began = perf_counter()
            if not transport.is_closing():
                size = length
                head = self._head(200, lines, context)
                if size <= MIN_WRITE_BYTES:
                    self._write((b"".join((head, *content)),))
                else:
                    first, *others = content
                    self._write((head + first, *others))
        except Exception as error:
            self._fail(run, context, error)
            return
        _end(run, context, size, began, None)
        if context.held and not self._connection.writable.is_set():
            work = self._finish_when_read(context)
            run_eagerly(work, copy_context(), self._shared.tasks, self._connection.fail)
        else:
            self._release(context)
            self._connection.finish()

    def _release(self, context: RequestContext) -> None:
        """Release the memory of a response, and forget its request: an idle connection would keep it."""
        context.release()
        self._context = None

    async def _finish_when_read(self, context: RequestContext) -> None:
        """Release the memory of a response when the client has read it or has left, and finish the request."""
        try:
            await self._connection.writable.wait()
        finally:
            self._release(context)
        self._connection.finish()

    async def _answer_in_chunks(self, known: KnownHttpRequest, run: FastRun, context: RequestContext) -> None:
        """Compute and write a large response chunk by chunk, at the pace of the client."""
        began = perf_counter()
        try:
            lines, (length, content) = known.compute(run)
            async with aclosing(_packets(content)) as chunks:
                head, turns = self._head(200, lines, context), known.prepared.path.engine.limits.turns
                size = await self._write_chunks(head, chunks, length, turns)
        except Exception as error:
            self._fail(run, context, error)
            return
        except BaseException as error:  # the service is ending
            _end(run, context, 0, began, error)
            self._release(context)
            raise
        if size == length:
            _end(run, context, size, began, None)
            await self._finish_when_read(context)
        else:
            _end(run, context, size, began, asyncio.CancelledError("the client left"))
            self._release(context)

    def _fail(self, run: FastRun, context: RequestContext, error: Exception) -> None:
        """End a failed run, and answer its request."""
        run.end(error)
        size = self._send_error(error, context.target[1] if context.target else "", context)
        run.count_bytes(context.received, size, context.read)

    def _send_error(self, error: Exception, path: str, context: RequestContext) -> int:
        """Answer a failed request, and return the size of the body. Within a response, reset the connection instead."""
        self._release(context)
        connection, active = self._connection, self._connection.active
        if active is None or active.answer_begun:
            LOG.exception(
                "internal error while sending a response; it is incomplete", extra={"request_id": context.text}
            )
            self._client.transport.abort()  # the client sees an incomplete response
            _end_trace(context, 200, error)
            return 0
        if not isinstance(error, PreblockError):
            LOG.exception(
                "internal error in a request; the client received status 500", extra={"request_id": context.text}
            )
        response = _error_response(error, path, context)
        size = 0 if self._client.transport.is_closing() else self._send_buffered(response, context)
        _end_trace(context, response.status_code)
        connection.finish()
        return size

    def send_internal_error(self, path: str, context: RequestContext) -> None:
        """Write a response with status 500."""
        self._send_buffered(_error_response(None, path, context), context)

    async def _answer(self, raw: RawRequest, call: TensorCall, context: RequestContext) -> None:
        CURRENT_REQUEST.set(context)
        dispatcher, route = self._shared.dispatcher, call.route
        try:
            response = await dispatcher.answer(raw, route)
            began = perf_counter()
            size = 0 if self._client.transport.is_closing() else await self._send(response, context)
        except Exception as error:
            self._send_error(error, route.path, context)
            return
        except asyncio.CancelledError:  # the service is ending
            _end_trace(context, 200)
            self._release(context)
            raise
        _end_trace(context, response.status_code)
        if context.protocol:
            dispatcher.count_bytes(context.protocol, context.received, size, context.read, perf_counter() - began)
        if dispatcher.prepared is not None and isinstance(response, ChunkedResponse) and response.prepare is not None:
            known = response.prepare(response)
            if known is not None:
                dispatcher.prepared.keep(call.key, known)
        await self._finish_when_read(context)

    async def _send(self, response: Response, context: RequestContext) -> int:
        """Write a response at the pace of the client, and return the size of its body."""
        if not isinstance(response, ChunkedResponse) or response.inline:
            return self._send_buffered(response, context)
        head = self._head(response.status_code, lines_of(response.raw_headers), context)
        async with aclosing(response.packets()) as chunks:
            return await self._write_chunks(head, chunks, response.size, response.turns or WriteTurns())

    def _send_buffered(self, response: Response, context: RequestContext) -> int:
        """Write a small response at once, and return the size of its body."""
        head = self._head(response.status_code, lines_of(response.raw_headers), context)
        content = list(response.content()) if isinstance(response, ChunkedResponse) else [bytes(response.body)]
        self._write((head, *content))
        return sum(map(len, content))

    async def _write_chunks(
        self, head: bytes, chunks: AsyncIterator[Buffer], size: int | None, turns: WriteTurns
    ) -> int:
        """Write a head and a body of `size` bytes, None for unknown; return the written bytes of the body.

        A body of unknown size is sent with chunked transfer encoding (RFC 9112, section 7.1). Writing stops when the
        client disconnects.
        """
        transport, written = self._client.transport, 0
        waiting: list[Buffer] = [head if size is not None else head.removesuffix(b"\r\n") + CHUNKED]
        await turns.wait(next_chunk=False)
        async for chunk in chunks:
            if transport.is_closing():
                return written
            waiting += (chunk,) if size is not None else (b"%x\r\n" % len(chunk), chunk, b"\r\n")
            written += len(chunk)
            left = None if size is None else size - written
            # Short chunks are written together, because each write wakes the client.
            if left and (left <= MIN_WRITE_BYTES or sum(map(len, waiting)) <= MIN_WRITE_BYTES):
                continue
            self._write(waiting)
            waiting.clear()
            del chunk  # lets the next chunk reuse this buffer
            # Other requests run only after the write, while the chunk is in the processor's cache. After the last
            # chunk none runs first: the client's next request may follow at once.
            if left == 0:
                continue
            if not self._connection.writable.is_set():
                await self._connection.writable.wait()
            await turns.wait()
        if size is None and not transport.is_closing():  # the client may have left after the last chunk
            transport.write(b"0\r\n\r\n")
        return written

    def _head(self, status: int, lines: bytes, context: RequestContext) -> bytes:
        """Return the head of a response with these header lines."""
        defaults = self._shared.server_state.default_headers
        if defaults is not self._default_headers:
            self._default_headers, self._default_lines = defaults, lines_of(defaults)
        end = b"\r\n" if self._connection.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINES[status], self._default_lines, lines, lines_of(context.headers()), end))

    def _write(self, parts: Sequence[Buffer]) -> None:
        """Write a part of the response to the active request."""
        if self._connection.active is not None:
            self._connection.active.answer_begun = True
        self._client.transport.writelines(parts)


async def _packets(buffers: Iterable[Buffer]) -> AsyncGenerator[Buffer, None]:
    """Yield the computed content of a response."""
    for packet in buffers:
        yield packet
        del packet  # lets the next packet reuse this buffer


def _end(
    run: FastRun,
    context: RequestContext,
    size: int,
    began: float,
    error: BaseException | None,
) -> None:
    """Record the end of a request: `size` bytes of its body were written since `began`."""
    run.end(error)
    seconds = perf_counter() - began
    run.count_bytes(context.received, size, context.read, seconds)
    _end_trace(context, 200, error if isinstance(error, Exception) else None)


def _end_trace(context: RequestContext, status: int, error: Exception | None = None) -> None:
    """End a request and its span, if it has one. After an `error` the response is incomplete."""
    context.set_status(status)
    if context.trace is not None:
        set_status(context.trace, status)
        end_span(context.trace, error)


def _error_response(error: Exception | None, path: str, context: RequestContext) -> Response:
    """Return the response to an error of a request, in the format of the protocol of `path`."""
    own = copy_context()
    own.run(CURRENT_REQUEST.set, context)  # the response holds its id
    if isinstance(error, PreblockError):
        return own.run(errors.respond, error, path)
    return own.run(errors.internal_error, path)
