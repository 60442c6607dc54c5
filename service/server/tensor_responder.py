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
from preblock.service.server.coroutines import drive

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
        target: Route,
        body: bytes,
        visit: RequestContext,
        scheme: str | None,
        passing: Headers,
    ) -> bool:
        """Answer a request by its template. Return False where a check fails; `answer` then gives the error."""
        if not body.startswith(template.head):
            return False
        read = template.read(body)
        if read is None or not template.fast_path.accepts(*read):
            return False
        run = template.fast_path.start(template.protocol, *read, visit, visit.began + visit.read)
        if run is None:
            return False
        self._trace(target, visit, scheme, passing)
        if run.batched:
            self._connection.loop.call_soon(self._finish, template, run, visit)
        elif run.streamed:
            drive(self._send_chunks(template, run, visit), copy_context(), self._connection.tasks)
        else:
            self._finish(template, run, visit)
        return True

    def answer(
        self,
        arrival: RawRequest,
        target: Route,
        visit: RequestContext,
        key: Hashable,
        scheme: str | None,
        passing: Headers,
    ) -> None:
        """Answer any other request for tensors, in a coroutine; a task is made only where it has to wait."""
        self._trace(target, visit, scheme, passing)
        drive(self._answer(arrival, target, visit, key), copy_context(), self._connection.tasks)

    def _trace(self, target: Route, visit: RequestContext, scheme: str | None, passing: Headers) -> None:
        if self._dispatcher.trace is not None:
            trace = begun(self._dispatcher.trace, visit, "POST", target.path, scheme or "http", passing)
            routed(trace, target.route)

    def _finish(self, template: RequestTemplate, run: FastRun, visit: RequestContext) -> None:
        transport = self._connection.transport
        try:
            vectors = run.finish()
        except Exception as error:
            LOG.exception("a request failed in an unforeseen way", extra={"request_id": visit.text})
            run.end(error)
            if not transport.is_closing():
                self._send_whole(errors.unforeseen(template.path), visit)
            _end_trace(visit, 500)
            self._connection.finish()
            return
        if transport.is_closing():
            self._count(template, run, visit, 0)
            _end_trace(visit, 200)
            return
        began = perf_counter()
        head = self._head(200, template.headers, visit)
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
        self._count(template, run, visit, template.size, perf_counter() - began)
        _end_trace(visit, 200)
        self._connection.finish()

    async def _send_chunks(self, template: RequestTemplate, run: FastRun, visit: RequestContext) -> None:
        """Write a large answer chunk by chunk, as each is computed and the client takes it."""
        began, size = perf_counter(), 0
        failure: BaseException | None = asyncio.CancelledError("the client left")
        try:
            async with aclosing(template.packets(run)) as packets:
                size = await self._send_packets(self._head(200, template.headers, visit), packets, template.size)
            if size == template.size:
                failure = None
        except Exception as error:
            failure = error
            self._abort(visit)
        finally:
            self._count(template, run, visit, size, perf_counter() - began, failure)
            _end_trace(visit, 200, failure if isinstance(failure, Exception) else None)
            if failure is None:
                self._connection.finish()

    @staticmethod
    def _count(
        template: RequestTemplate,
        run: FastRun,
        visit: RequestContext,
        size: int,
        seconds: float = 0,
        error: BaseException | None = None,
    ) -> None:
        """End a request; its answer of `size` bytes took so many seconds to send."""
        run.end(error)
        template.fast_path.metrics.count_bytes(template.protocol, visit.received, size, visit.read, seconds)

    async def _answer(self, arrival: RawRequest, target: Route, visit: RequestContext, key: Hashable) -> None:
        CURRENT_REQUEST.set(visit)
        dispatcher = self._dispatcher
        try:
            response = await dispatcher.answer(arrival, target)
            began = perf_counter()
            size = 0 if self._connection.transport.is_closing() else await self._send(response, visit)
        except Exception as error:
            self._abort(visit)
            _end_trace(visit, 200, error)
            return
        except asyncio.CancelledError:  # at the end of the service
            _end_trace(visit, 200)
            raise
        _end_trace(visit, response.status_code)
        if visit.protocol:
            dispatcher.count_bytes(visit.protocol, visit.received, size, visit.read, perf_counter() - began)
        if (
            dispatcher.templates is not None
            and isinstance(response, ChunkedResponse)
            and response.template
            and (template := response.template(response))
        ):
            template.path, template.name, template.version = target.path, target.name, target.version
            dispatcher.templates.keep(key, template)
        self._connection.finish()

    async def _send(self, response: Response, visit: RequestContext) -> int:
        """Write an answer, as fast as the client takes it, and return the size of its body."""
        if not isinstance(response, ChunkedResponse):
            return self._send_whole(response, visit)
        transport = self._connection.transport
        head = self._head(response.status_code, lines_of(response.raw_headers), visit)
        if response.small:
            content = list(response.content())
            transport.writelines((head, *content))
            return sum(map(len, content))
        async with aclosing(response.packets()) as packets:
            return await self._send_packets(head, packets, response.size)

    async def _send_packets(self, head: bytes, packets: AsyncIterator[Buffer], size: int | None) -> int:
        """Write a head and a body of `size` bytes, None for unknown; return the written bytes of the body.

        A body of unknown size is written in chunks (RFC 9112, section 7.1). A client that leaves ends the writing.
        """
        transport, written = self._connection.transport, 0
        waiting: list[Buffer] = [head if size is not None else head.removesuffix(b"\r\n") + CHUNKED]
        async for packet in packets:
            if transport.is_closing():
                return written
            waiting += (packet,) if size is not None else (b"%x\r\n" % len(packet), packet, b"\r\n")
            written += len(packet)
            left = None if size is None else size - written
            # A short packet goes with its neighbours, because each write wakes the client.
            if left and (left <= MIN_WRITE_BYTES or sum(map(len, waiting)) <= MIN_WRITE_BYTES):
                continue
            transport.writelines(waiting)
            waiting.clear()
            del packet  # lets the next packet reuse this buffer
            # Others wait until a packet is sent, because it is still in the processor's cache. After the last packet
            # nobody goes first: the client's next request may follow at once.
            if left != 0:
                await self._let_others_run()
        if size is None and not transport.is_closing():  # the client may have left after the last packet
            transport.write(b"0\r\n\r\n")
        return written

    def _send_whole(self, response: Response, visit: RequestContext) -> int:
        """Write an answer without tensors, and return the size of its body."""
        head = self._head(response.status_code, lines_of(response.raw_headers), visit)
        self._connection.transport.write(head + bytes(response.body))
        return len(response.body)

    def _head(self, status: int, lines: bytes, visit: RequestContext) -> bytes:
        """Return the head of an answer with such header lines."""
        defaults = self._connection.default_headers
        if defaults is not self._default_headers:
            self._default_headers, self._default_lines = defaults, lines_of(defaults)
        end = b"\r\n" if self._connection.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINES[status], self._default_lines, lines, visit.lines(), end))

    async def _let_others_run(self) -> None:
        """Wait until more can be written, for one event-loop iteration at least."""
        if self._connection.write_paused:
            await self._connection.drain()
        else:
            await asyncio.sleep(0)

    def _abort(self, visit: RequestContext) -> None:
        """Break the connection, so that the client sees an incomplete answer."""
        LOG.exception("an answer was broken off", extra={"request_id": visit.text})
        self._connection.transport.abort()


def _end_trace(visit: RequestContext, status: int, error: Exception | None = None) -> None:
    """End the span of a request, if it has one. After an `error` the answer is incomplete."""
    if visit.trace is not None:
        answered(visit.trace, status)
        ended(visit.trace, error)


def refusal(status: int, text: str, headers: Headers) -> bytes:
    """Return the answer to broken input; the connection closes behind it."""
    content = text.encode()
    fields: list[tuple[bytes, bytes]] = [
        *headers,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
    ]
    return b"".join((STATUS_LINES[status], lines_of(fields), b"\r\n", content))


async def receive_nothing() -> Any:
    """Stand for the `receive` of ASGI where the body is there."""
    raise RuntimeError("the body was received already")
