"""Writes responses to tensor requests to the connection, without the tasks and messages of ASGI.

Those would cost as much as all other work for a small response.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import copy_context
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING

from fastapi.responses import Response

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse, Headers, lines_of
from preblock.service.api.http.tracing import end_span, set_route, set_status, start_span
from preblock.service.api.request_cache import RequestTemplate, Template
from preblock.service.codecs.chunks import MIN_WRITE_BYTES, Buffer
from preblock.service.core.errors import PreblockError
from preblock.service.core.write_turns import WriteTurns
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.coroutines import run_eagerly
from preblock.service.server.incoming_request import IncomingRequest, Refusal

if TYPE_CHECKING:
    from preblock.service.server.front import Front

LOG = logging.getLogger(__name__)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class TensorResponder:
    """Answers tensor requests, one at a time.

    Args:
        connection: of the client.
        dispatcher: the application.

    """

    def __init__(self, connection: "Front", dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._default_headers: Headers | None = None
        self._default_lines = b""
        self._context: RequestContext | None = None

    @property
    def held(self) -> int:
        """Bytes of memory that the response to the last request holds."""
        return 0 if self._context is None else self._context.held

    def answer_by_template(
        self, template: Template, request: IncomingRequest, body: bytes, context: RequestContext
    ) -> bool:
        """Answer a request from its template. Return False if a check fails; `answer` then produces the error."""
        run = template.start(body, context)
        if run is None:
            return False
        connection, self._context = self._connection, context
        try:
            self._begin_trace(request, context)
            if run.batched:
                connection.loop.call_soon(connection.guard, self._finish, template, run, context)
            elif run.streamed and isinstance(template, RequestTemplate):
                work = self._answer_in_chunks(template, run, context)
                run_eagerly(work, copy_context(), connection.tasks, connection.fail)
            else:
                self._finish(template, run, context)
        except BaseException as error:
            run.end(error)
            self._release(context)
            raise
        return True

    def answer(self, raw: RawRequest, request: IncomingRequest, context: RequestContext) -> None:
        """Answer any other tensor request, without a task unless it has to wait."""
        connection, self._context = self._connection, context
        self._begin_trace(request, context)
        run_eagerly(self._answer(raw, request, context), copy_context(), connection.tasks, connection.fail)

    def _begin_trace(self, request: IncomingRequest, context: RequestContext) -> None:
        if self._dispatcher.trace is not None and (route := request.route) is not None:
            scheme = request.scheme or "http"
            trace = start_span(self._dispatcher.trace, context, "POST", route.path, scheme, request.identifying)
            set_route(trace, route.pattern)

    def _finish(self, template: Template, run: FastRun, context: RequestContext) -> None:
        transport, began, size = self._connection.transport, 0.0, 0
        try:
            lines, content = template.write(run)
            began = perf_counter()
            if not transport.is_closing():
                size = sum(map(len, content))
                head = self._head(200, lines, context)
                if size <= MIN_WRITE_BYTES:
                    self._write((b"".join((head, *content)),))
                else:
                    self._write((head + content[0], *content[1:]))
        except Exception as error:
            self._fail(template, run, context, error)
            return
        _end(template, run, context, size, began, None)
        if context.held and self._connection.write_paused:
            connection = self._connection
            run_eagerly(self._finish_when_read(context), copy_context(), connection.tasks, connection.fail)
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

    async def _answer_in_chunks(self, template: RequestTemplate, run: FastRun, context: RequestContext) -> None:
        """Compute and write a large response chunk by chunk, at the pace of the client."""
        began = perf_counter()
        try:
            async with aclosing(template.packets(run)) as chunks:
                head, turns = self._head(200, template.headers, context), template.fast_path.admission.limits.turns
                size = await self._write_chunks(head, chunks, template.size, turns)
        except Exception as error:
            self._fail(template, run, context, error)
            return
        except BaseException as error:  # the service is ending
            _end(template, run, context, 0, began, error)
            self._release(context)
            raise
        if size == template.size:
            _end(template, run, context, size, began, None)
            await self._finish_when_read(context)
        else:
            _end(template, run, context, size, began, asyncio.CancelledError("the client left"))
            self._release(context)

    def _fail(self, template: Template, run: FastRun, context: RequestContext, error: Exception) -> None:
        """End a failed run, and answer its request."""
        run.end(error)
        size = self._send_error(error, template.path, context)
        template.fast_path.metrics.count_bytes(template.protocol, context.received, size, context.read)

    def _send_error(self, error: Exception, path: str, context: RequestContext) -> int:
        """Answer a failed request, and return the size of the body. Within a response, reset the connection instead."""
        self._release(context)
        connection, active = self._connection, self._connection.active
        if active is None or active.answer_begun:
            LOG.exception(
                "internal error while sending a response; it is incomplete", extra={"request_id": context.text}
            )
            connection.transport.abort()  # the client sees an incomplete response
            _end_trace(context, 200, error)
            return 0
        if not isinstance(error, PreblockError):
            LOG.exception(
                "internal error in a request; the client received status 500", extra={"request_id": context.text}
            )
        response = _error_response(error, path, context)
        size = 0 if connection.transport.is_closing() else self._send_buffered(response, context)
        _end_trace(context, response.status_code)
        connection.finish()
        return size

    def send_internal_error(self, path: str, context: RequestContext) -> None:
        """Write a response with status 500."""
        self._send_buffered(_error_response(None, path, context), context)

    async def _answer(self, raw: RawRequest, request: IncomingRequest, context: RequestContext) -> None:
        CURRENT_REQUEST.set(context)
        dispatcher, route = self._dispatcher, request.route
        assert route is not None
        try:
            response = await dispatcher.answer(raw, route)
            began = perf_counter()
            size = 0 if self._connection.transport.is_closing() else await self._send(response, context)
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
        if dispatcher.templates is not None and isinstance(response, ChunkedResponse) and response.template is not None:
            template = response.template(response)
            if template is not None:
                template.path = route.path
                if isinstance(template, RequestTemplate):
                    template.name, template.version = route.name, route.version
                dispatcher.templates.keep(request.key, template)
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
        transport, written = self._connection.transport, 0
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
            if self._connection.write_paused:
                await self._connection.writable.wait()
            await turns.wait()
        if size is None and not transport.is_closing():  # the client may have left after the last chunk
            transport.write(b"0\r\n\r\n")
        return written

    def _head(self, status: int, lines: bytes, context: RequestContext) -> bytes:
        """Return the head of a response with these header lines."""
        defaults = self._connection.server_state.default_headers
        if defaults is not self._default_headers:
            self._default_headers, self._default_lines = defaults, lines_of(defaults)
        end = b"\r\n" if self._connection.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINES[status], self._default_lines, lines, lines_of(context.headers()), end))

    def _write(self, parts: Sequence[Buffer]) -> None:
        """Write a part of the response to the active request."""
        if self._connection.active is not None:
            self._connection.active.answer_begun = True
        self._connection.transport.writelines(parts)


def _end(
    template: Template,
    run: FastRun,
    context: RequestContext,
    size: int,
    began: float,
    error: BaseException | None,
) -> None:
    """Record the end of a request: `size` bytes of its body were written since `began`."""
    run.end(error)
    seconds = perf_counter() - began
    template.fast_path.metrics.count_bytes(template.protocol, context.received, size, context.read, seconds)
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


def error_response(refusal: Refusal, headers: Headers) -> bytes:
    """Return the response to malformed input, after which the connection closes."""
    content = refusal.text.encode()
    fields: list[tuple[bytes, bytes]] = [
        *headers,
        *refusal.headers,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
    ]
    return b"".join((STATUS_LINES[refusal.status], lines_of(fields), b"\r\n", content))
