"""Answers to requests for tensors, written to the connection without tasks and messages of ASGI.

These would cost as much as all the rest of a small answer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable
from contextlib import aclosing
from contextvars import copy_context
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest, Route
from preblock.service.api.http.response import ChunkedResponse, Headers, lines_of
from preblock.service.api.http.tracing import answered, begun, ended, routed
from preblock.service.api.request_cache import RequestTemplate
from preblock.service.codecs.chunks import MIN_WRITE_BYTES, Buffer, base64_text, raw_bytes
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.coroutines import run_eagerly

if TYPE_CHECKING:
    from preblock.service.server.front import Front

LOG = logging.getLogger(__name__)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class TensorResponder:
    """Answers requests for tensors, one at a time.

    Args:
        connection: of the client.
        dispatcher: the application.

    """

    def __init__(self, connection: "Front", dispatcher: Dispatcher) -> None:
        self._connection, self._dispatcher = connection, dispatcher
        self._default_headers: Headers | None = None
        self._default_lines = b""

    def answer_by_template(
        self,
        template: RequestTemplate,
        route: Route,
        body: bytes,
        context: RequestContext,
        scheme: str | None,
        identifying: Headers,
    ) -> bool:
        """Answer a request by its template. Return False where a check fails; `answer` then gives the error."""
        if not body.startswith(template.head):
            return False
        read = template.read(body)
        if read is None or not template.fast_path.takes(*read):
            return False
        run = template.fast_path.start(template.protocol, *read, context, context.began + context.read)
        if run is None:
            return False
        self._trace(route, context, scheme, identifying)
        if run.shared:
            self._connection.loop.call_soon(self._finish, template, run, context)
        elif run.large:
            run_eagerly(self._answer_in_chunks(template, run, context), copy_context(), self._connection.tasks)
        else:
            self._finish(template, run, context)
        return True

    def answer(
        self,
        request: RawRequest,
        route: Route,
        context: RequestContext,
        key: Hashable,
        scheme: str | None,
        identifying: Headers,
    ) -> None:
        """Answer any other request for tensors, in a coroutine; a task is made only where it has to wait."""
        self._trace(route, context, scheme, identifying)
        run_eagerly(self._answer(request, route, context, key), copy_context(), self._connection.tasks)

    def _trace(self, route: Route, context: RequestContext, scheme: str | None, identifying: Headers) -> None:
        if self._dispatcher.trace is not None:
            trace = begun(self._dispatcher.trace, context, "POST", route.path, scheme or "http", identifying)
            routed(trace, route.route)

    def _finish(self, template: RequestTemplate, run: FastRun, context: RequestContext) -> None:
        transport = self._connection.transport
        try:
            vectors = run.finish()
        except Exception as error:
            LOG.exception("a request failed in an unforeseen way", extra={"request_id": context.text})
            run.end(error)
            if not transport.is_closing():
                self._send_buffered(errors.unforeseen(template.path), context)
            _end_trace(context, 500)
            self._connection.finish()
            return
        if transport.is_closing():
            self._count(template, run, context, 0)
            _end_trace(context, 200)
            return
        began = perf_counter()
        head = self._head(200, template.headers, context)
        if template.suffix is not None:
            text = base64_text(vectors)
            if len(text) <= MIN_WRITE_BYTES:
                transport.write(b"".join((head, template.prefix, text, template.suffix)))
            else:
                transport.writelines((head + template.prefix, text, template.suffix))
        elif vectors.nbytes <= MIN_WRITE_BYTES:
            transport.write(b"".join((head, template.prefix, vectors.data)))
        else:
            transport.writelines((head + template.prefix, raw_bytes(vectors)))
        self._count(template, run, context, template.size, perf_counter() - began)
        _end_trace(context, 200)
        self._connection.finish()

    async def _answer_in_chunks(self, template: RequestTemplate, run: FastRun, context: RequestContext) -> None:
        """Write a large answer chunk by chunk, as each is computed and the client takes it."""
        began, size = perf_counter(), 0
        failure: BaseException | None = asyncio.CancelledError("the client left")
        try:
            async with aclosing(template.packets(run)) as chunks:
                size = await self._write_chunks(self._head(200, template.headers, context), chunks, template.size)
            if size == template.size:
                failure = None
        except Exception as error:
            failure = error
            self._abort(context)
        finally:
            self._count(template, run, context, size, perf_counter() - began, failure)
            _end_trace(context, 200, failure if isinstance(failure, Exception) else None)
            if failure is None:
                self._connection.finish()

    @staticmethod
    def _count(
        template: RequestTemplate,
        run: FastRun,
        context: RequestContext,
        size: int,
        seconds: float = 0,
        error: BaseException | None = None,
    ) -> None:
        """End a request; its answer of `size` bytes took so many seconds to send."""
        run.end(error)
        template.fast_path.metrics.count_bytes(template.protocol, context.received, size, context.read, seconds)

    async def _answer(self, request: RawRequest, route: Route, context: RequestContext, key: Hashable) -> None:
        CURRENT_REQUEST.set(context)
        dispatcher = self._dispatcher
        try:
            response = await dispatcher.answer(request, route)
            began = perf_counter()
            size = 0 if self._connection.transport.is_closing() else await self._send(response, context)
        except Exception as error:
            self._abort(context)
            _end_trace(context, 200, error)
            return
        except asyncio.CancelledError:  # at the end of the service
            _end_trace(context, 200)
            raise
        _end_trace(context, response.status_code)
        if context.protocol:
            dispatcher.count_bytes(context.protocol, context.received, size, context.read, perf_counter() - began)
        if (
            dispatcher.templates is not None
            and isinstance(response, ChunkedResponse)
            and response.template
            and (template := response.template(response))
        ):
            template.path, template.name, template.version = route.path, route.name, route.version
            dispatcher.templates.keep(key, template)
        self._connection.finish()

    async def _send(self, response: Response, context: RequestContext) -> int:
        """Write an answer, as fast as the client takes it, and return the size of its body."""
        if not isinstance(response, ChunkedResponse):
            return self._send_buffered(response, context)
        transport = self._connection.transport
        head = self._head(response.status_code, lines_of(response.raw_headers), context)
        if response.small:
            content = list(response.content())
            transport.writelines((head, *content))
            return sum(map(len, content))
        async with aclosing(response.packets()) as chunks:
            return await self._write_chunks(head, chunks, response.size)

    async def _write_chunks(self, head: bytes, chunks: AsyncIterator[Buffer], size: int | None) -> int:
        """Write a head and a body of `size` bytes, None for unknown; return the written bytes of the body.

        A body of unknown size is written in chunks (RFC 9112, section 7.1). A client that leaves ends the writing.
        """
        transport, written = self._connection.transport, 0
        waiting: list[Buffer] = [head if size is not None else head.removesuffix(b"\r\n") + CHUNKED]
        async for chunk in chunks:
            if transport.is_closing():
                return written
            waiting += (chunk,) if size is not None else (b"%x\r\n" % len(chunk), chunk, b"\r\n")
            written += len(chunk)
            left = None if size is None else size - written
            # A short chunk goes with its neighbours, because each write wakes the client.
            if left and (left <= MIN_WRITE_BYTES or sum(map(len, waiting)) <= MIN_WRITE_BYTES):
                continue
            transport.writelines(waiting)
            waiting.clear()
            del chunk  # lets the next chunk reuse this buffer
            # Others wait until a chunk is sent, because it is still in the processor's cache. After the last chunk
            # nobody goes first: the client's next request may follow at once.
            if left != 0:
                await self._let_others_run()
        if size is None and not transport.is_closing():  # the client may have left after the last chunk
            transport.write(b"0\r\n\r\n")
        return written

    def _send_buffered(self, response: Response, context: RequestContext) -> int:
        """Write an answer without tensors, and return the size of its body."""
        head = self._head(response.status_code, lines_of(response.raw_headers), context)
        self._connection.transport.write(head + bytes(response.body))
        return len(response.body)

    def _head(self, status: int, lines: bytes, context: RequestContext) -> bytes:
        """Return the head of an answer with such header lines."""
        defaults = self._connection.default_headers
        if defaults is not self._default_headers:
            self._default_headers, self._default_lines = defaults, lines_of(defaults)
        end = b"\r\n" if self._connection.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINES[status], self._default_lines, lines, context.lines(), end))

    async def _let_others_run(self) -> None:
        """Wait until more can be written, for one event-loop iteration at least."""
        if self._connection.write_paused:
            await self._connection.drain()
        else:
            await asyncio.sleep(0)

    def _abort(self, context: RequestContext) -> None:
        """Break the connection, so that the client sees an incomplete answer."""
        LOG.exception("an answer was broken off", extra={"request_id": context.text})
        self._connection.transport.abort()


def _end_trace(context: RequestContext, status: int, error: Exception | None = None) -> None:
    """End the span of a request, if it has one. After an `error` the answer is incomplete."""
    if context.trace is not None:
        answered(context.trace, status)
        ended(context.trace, error)


def error_response(status: int, text: str, headers: Headers) -> bytes:
    """Return the answer to broken input; the connection closes behind it."""
    content = text.encode()
    fields: list[tuple[bytes, bytes]] = [
        *headers,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
    ]
    return b"".join((STATUS_LINES[status], lines_of(fields), b"\r\n", content))


async def refuse_receive() -> Any:
    """Stand for the `receive` of ASGI where the body is there."""
    raise RuntimeError("the body was received already")
