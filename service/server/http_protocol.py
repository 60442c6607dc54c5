"""The connections of clients, as uvicorn has them. Requests for tensors are answered in them: the tasks and messages of
ASGI would cost as much as all the rest of a small answer. Everything else is the application's.
"""

import asyncio
import logging
import struct
from collections.abc import Hashable
from contextlib import suppress
from contextvars import Context, copy_context
from copy import copy
from http.client import SWITCHING_PROTOCOLS
from time import perf_counter
from typing import Any, Literal, NamedTuple

from fastapi.responses import Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from websockets.frames import apply_mask  # type: ignore[attr-defined]
from websockets.http11 import Request

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse, Headers, lines_of
from preblock.service.api.http.routes.decode import CONNECTION
from preblock.service.api.http.streaming.session import DecodeSession
from preblock.service.api.http.target import Route
from preblock.service.api.http.tracing import answered, begun, ended, routed
from preblock.service.api.request_cache import RequestTemplate
from preblock.service.api.streams import LIFETIME, StreamLifetime
from preblock.service.codecs.chunks import COPIED, Buffer, base64_text, raw_bytes
from preblock.service.core.errors import PreblockError
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, PER_REQUEST_HEADERS, RequestContext, wanted
from preblock.service.server.bounded_protocols import PART, BoundedHttp, BoundedWebSocket
from preblock.service.server.eager import drive
from preblock.service.server.write_coalescing import Gathered

LOG = logging.getLogger(__name__)
LONGEST_BODY = 2**18
"""Bytes of a body that is awaited here, its length being told; an answer to more takes long anyway."""
ELSEWHERE = {b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"}
"""Headers of requests that are the application's."""
BEGIN = b"POST "
"""What the head of a request for tensors begins with."""
HEAD_END = b"\r\n\r\n"
"""What the head of a request ends with."""
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
Header = tuple[bytes, bytes]
BINARY, MASKED = 0x82, 0x80
"""The first byte of a binary message in one frame, and of the second what says that it is masked (RFC 6455, 5.2)."""
SHORTEST = 6
"""Bytes of a frame of a client, at least."""


class _Turn:
    """Stands where uvicorn has the request that is answered, while that is one that is answered here."""

    disconnected = response_started = False
    more_body = True

    def __init__(self) -> None:
        self.response_complete = True
        self.keep_alive = True
        self.scope: dict[str, Any] = {"state": {}}
        self.message_event = asyncio.Event()


class _Last(NamedTuple):
    """What is remembered of the last request of a connection that was read and answered like one before.

    The next may begin with the same bytes.

    Args:
        head: all of it before its body, as it came.
        size: bytes of it in all.
        target: what it is for.
        key: of its form.
        passing: headers that say which request it is.
        wanted: the id that they give it.
        scheme: by which it came.
        context: in which it was answered.
        changes: as `Dispatcher.changes` had them.

    """

    head: bytes
    size: int
    target: Route
    key: Hashable
    passing: list[Header]
    wanted: bytes | None
    scheme: str | None
    context: Context
    changes: int


class Http(BoundedHttp):
    """A connection of HTTP/1.1.

    It also ends the decode streams when the server stops, and one whose client leaves; uvicorn alone would go on.
    """

    cycle: RequestResponseCycle | _Turn | None  # type: ignore[assignment]
    _target: Route | None = None
    _form: RequestTemplate | None = None
    _context: Context
    _gathered: Gathered
    _passing: list[Header]
    _last: _Last | None = None
    _held = 0.0  # when a head came that is held, which is the one that is remembered; 0: none is
    _came = b""  # at once with the beginning of the request that is read, until that is whole; not kept if it is long
    _between = True  # two requests, of which nothing was read yet of the second

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app = self.app
        self._proxies: ProxyHeadersMiddleware | None = None
        if isinstance(app, ProxyHeadersMiddleware):  # stands before the application, and says who the client is
            self._proxies, app = copy(app), app.app
            self._proxies.app = _nobody
        self._entry = app if isinstance(app, Dispatcher) else None
        self._turn = _Turn()
        self._defaults: Headers | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._gathered = Gathered(transport, self.loop)

    def data_received(self, data: bytes) -> None:
        """Read what has come, unless it is a request whose head is the one that is remembered.

        Many clients send a body apart from its head: such a head is held until there is more.
        """
        last = self._last
        if last is not None:
            data = last.head + data if self._held else data
            if data.startswith(last.head) and self._answer_again(last, data):
                return
        if self._between:
            self._came = data if len(data) <= PART else b""
        super().data_received(data)

    def _answer_again(self, last: _Last, data: bytes) -> bool:
        """Answer a request whose head is remembered, or hold its head, and return whether nothing needs to be read.

        Reading a head takes a third of the time of a small answer.
        """
        began, turn, entry, size = self._held or perf_counter(), self._turn, self._entry, len(data)
        if not self._between or self.unfinished or self.cycle is not turn or not turn.response_complete:
            return False
        if self.turns.rest or (size != last.size and size != len(last.head)):
            return False
        self._unset_keepalive_if_required()
        if size != last.size:
            self._held = began
            return True
        assert entry is not None
        assert entry.forms is not None
        if entry.changes() != last.changes:
            return False
        form = last.context.run(entry.forms.find, last.target, last.key)
        if form is None:
            return False
        turn.response_complete = False
        body = data[len(last.head) :]
        visit = RequestContext(last.wanted, began)
        visit.received, visit.read = len(body), perf_counter() - began
        self._passing, self._scheme = last.passing, last.scheme
        if last.context.run(self._answer_alike, form, last.target, body, visit):
            self._held = 0.0
            return True
        turn.response_complete = True
        return False

    def on_message_begin(self) -> None:
        """Forget the request before."""
        self._between = False
        self._began, self._held = self._held or perf_counter(), 0.0
        self.url = b""
        self._raw: list[Header] = []
        self._passing = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header as it is; what says only which request it is makes no two unlike."""
        lower = name.lower()
        if lower in PER_REQUEST_HEADERS:
            self._passing.append((lower, value))
        else:
            self._raw.append((name, value))

    def on_headers_complete(self) -> None:
        """Choose who answers."""
        self.head_came(self._raw)
        self._target = self._form = None
        entry, cycle = self._entry, self.cycle
        if entry is not None and (cycle is None or cycle.response_complete):
            target = entry.target(self.url)
            if target is not None and self._is_for(target, entry):
                self._target = target
                self._parts: list[bytes] = []
                self.cycle = turn = self._turn
                turn.response_complete, turn.keep_alive = False, self.parser.should_keep_alive()
                turn.more_body = True
                return
        self._begin()
        super().on_headers_complete()
        if isinstance(self.cycle, RequestResponseCycle):  # and no WebSocket
            self._gathered.gather(self.cycle)

    def on_response_complete(self) -> None:
        """Let the next request have its turn, behind all of the answer."""
        self._gathered.flush()
        super().on_response_complete()

    def _is_for(self, target: Route, entry: Dispatcher) -> bool:
        """Return whether a request that may be for `target` is to be answered here."""
        if self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return False
        self._asker, self._scheme = (self.client, self.scheme) if self._proxies is None else self._forwarded()
        if entry.forms is not None:
            self._key = (self.url, *self._raw)
            self._changes = entry.changes()
            context = entry.admitted(self._raw, self._asker)
            if context is not None and (form := context.run(entry.forms.find, target, self._key)) is not None:
                self._form, self._context = form, context
                return True
        length = None
        for name, value in self._raw:
            name = name.lower()
            if name == b"content-length":
                length = value
            elif name in ELSEWHERE:
                return False
        return length is not None and len(length) <= 6 and int(length) <= LONGEST_BODY

    def _forwarded(self) -> tuple[tuple[str, int] | None, str | None]:
        """Return whose request it is, and by which scheme it came, as a proxy says that is trusted."""
        assert self._proxies is not None
        scope: dict[str, Any] = {"type": "http", "client": self.client, "scheme": self.scheme}
        scope["headers"] = self._passing
        with suppress(StopIteration):  # it waits for nothing
            self._proxies(scope, _nothing, _nothing).send(None)  # type: ignore[arg-type]
        return scope["client"], scope["scheme"]

    def _trace(self, target: Route, visit: RequestContext) -> None:
        """Begin the span of a request, if requests are traced."""
        assert self._entry is not None
        if self._entry.trace is not None:
            trace = begun(self._entry.trace, visit, "POST", target.path, self._scheme or "http", self._passing)
            routed(trace, target.route)

    def _begin(self) -> None:
        """Keep the head of a request as ASGI has it."""
        url = self.url
        super().on_message_begin()
        self.url = url
        for header in (*self._raw, *self._passing):
            super().on_header(*header)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        if self._target is None:
            super().on_body(body)
        else:
            self.unfinished = 0
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """Answer, now that the body is there."""
        came, self._came, self._between = self._came, b"", True
        target = self._target
        if target is None:
            super().on_message_complete()
            return
        self._turn.more_body = False
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        visit = RequestContext(wanted(self._passing), self._began)
        visit.received, visit.read = len(body), perf_counter() - self._began
        if self._form is not None and self._context.run(self._answer_alike, self._form, target, body, visit):
            self._remember(target, came, len(body))
            return
        self._trace(target, visit)
        self._begin()
        self.scope["path"], self.scope["query_string"] = target.path, target.query
        self.scope["client"], self.scope["scheme"] = self._asker, self._scheme  # type: ignore[typeddict-item]
        arrival = RawRequest(self.scope, _nothing, body)  # type: ignore[arg-type]
        drive(self._answer(arrival, target, visit), copy_context(), self.tasks)

    def _remember(self, target: Route, came: bytes, length: int) -> None:
        """Remember a request with a body of such a length, if it came alone, and all of it or its head at once.

        `came` is what came with its beginning.
        """
        head, end, rest = came.partition(HEAD_END)
        # An empty line may stand before a request: what it ends is no head.
        if end and head.startswith(BEGIN) and len(rest) in (0, length) and self._turn.keep_alive:
            head += end
            known = self._key, self._passing, wanted(self._passing), self._scheme, self._context, self._changes
            self._last = _Last(head, len(head) + length, target, *known)

    def _answer_alike(self, form: RequestTemplate, target: Route, body: bytes, visit: RequestContext) -> bool:
        """Answer a request like one before, unless it is to be refused: why, the way that is everybody's tells."""
        if not body.startswith(form.head):
            return False
        read = form.read(body)
        if read is None or not form.plain.takes(*read):
            return False
        try:
            form.plain.limits.__enter__()
        except PreblockError:
            return False
        self._trace(target, visit)
        run = FastRun(form.plain, form.protocol, *read)
        visit.marks = run.execution.marks
        if run.shared:
            self.loop.call_soon(self._finish, form, run, visit)
        elif run.large:
            drive(self._send_pieces(form, run, visit), copy_context(), self.tasks)
        else:
            self._finish(form, run, visit)
        return True

    def _finish(self, form: RequestTemplate, run: FastRun, visit: RequestContext) -> None:
        """Write the answer to a request like one before."""
        transport = self.transport
        try:
            vectors = run.finish()
        except Exception:
            LOG.exception("a request failed in an unforeseen way", extra={"request_id": visit.text})
            run.fail(visit, "internal_error")
            if not transport.is_closing():
                self._send_whole(errors.unforeseen(form.path), visit)
            _ended(visit, 500)
            self._end()
            return
        finally:
            form.plain.limits.__exit__(None, None, None)
        if transport.is_closing():
            run.count(visit, visit.began + visit.read, visit.received, 0)
            _ended(visit, 200)
            return
        began = perf_counter()
        head = self._head(200, form.headers, visit)
        if form.suffix is not None:
            text = base64_text(vectors)
            if len(text) <= COPIED:
                transport.write(b"".join((head, form.prefix, text, form.suffix)))
            else:
                transport.writelines((head + form.prefix, text, form.suffix))
        elif vectors.nbytes <= COPIED:
            transport.write(b"".join((head, form.prefix, vectors.data)))
        else:
            transport.writelines((head + form.prefix, raw_bytes(vectors)))
        run.count(visit, visit.began + visit.read, visit.received, form.size, perf_counter() - began)
        _ended(visit, 200)
        self._end()

    async def _send_pieces(self, form: RequestTemplate, run: FastRun, visit: RequestContext) -> None:
        """Write a large answer piece by piece, each when it is computed, as fast as the client takes them."""
        began, size = perf_counter(), len(form.prefix)
        outcome: Literal["ok", "internal_error", "cancelled"] = "cancelled"
        failure: Exception | None = None
        waiting: list[Buffer] = [self._head(200, form.headers, visit) + form.prefix]
        try:
            for content in form.content(run):
                waiting.append(content)
                size += len(content)
                del content  # the next may lie where this one does
                left = form.size - size
                if 0 < left <= COPIED:  # the end of a text: alone it would wake the client once more
                    continue
                self.transport.writelines(waiting)
                waiting.clear()
                # Others come behind a piece, not before: it is sent from the cache. But not behind the last, on whose
                # heels the next request may come.
                if left:
                    await self._let_others()
                    if self.transport.is_closing():
                        return
            outcome = "ok"
        except Exception as error:
            outcome, failure = "internal_error", error
            self._break_off(visit)
        finally:
            form.plain.limits.__exit__(None, None, None)
            if outcome == "ok":
                run.count(visit, visit.began + visit.read, visit.received, size, perf_counter() - began)
                _ended(visit, 200)
                self._end()
            else:
                run.fail(visit, outcome)
                _ended(visit, 200, failure)
                form.plain.metrics.carried(form.protocol, visit.received, size, visit.read, perf_counter() - began)

    async def _answer(self, arrival: RawRequest, target: Route, visit: RequestContext) -> None:
        """Answer a request for `target`."""
        assert self._entry is not None
        CURRENT_REQUEST.set(visit)
        try:
            response = await self._entry.answer(arrival, target)
            began = perf_counter()
            size = 0 if self.transport.is_closing() else await self._send(response, visit)
        except Exception as error:
            self._break_off(visit)
            _ended(visit, 200, error)
            return
        except asyncio.CancelledError:  # at the end of the service
            _ended(visit, 200)
            raise
        _ended(visit, response.status_code)
        if visit.protocol:
            self._entry.carried(visit.protocol, visit.received, size, visit.read, perf_counter() - began)
        forms = self._entry.forms
        if (
            forms is not None
            and isinstance(response, ChunkedResponse)
            and response.form
            and (form := response.form(response))
        ):
            form.path = target.path
            forms.keep(self._key, form)
        self._end()

    async def _send(self, response: Response, visit: RequestContext) -> int:
        """Write an answer, as fast as the client takes it, and return how many bytes follow its head."""
        if not isinstance(response, ChunkedResponse):
            return self._send_whole(response, visit)
        transport = self.transport
        head = self._head(response.status_code, lines_of(response.raw_headers), visit)
        if response.small:
            content = list(response.content())
            transport.writelines((head, *content))
            return sum(map(len, content))
        chunked = response.size is None  # RFC 9112, section 7.1
        head = head.removesuffix(b"\r\n") + CHUNKED if chunked else head
        waiting: list[Buffer] = [head]
        size = 0
        async for packet in response.packets():
            if transport.is_closing():
                return size
            waiting += (b"%x\r\n" % len(packet), packet, b"\r\n") if chunked else (packet,)
            size += len(packet)
            left = None if response.size is None else response.size - size
            # What is small is sent with what comes before or after it: alone it would wake the client once more.
            if left and not chunked and (left <= COPIED or sum(map(len, waiting)) <= COPIED):
                continue
            transport.writelines(waiting)
            waiting.clear()
            del packet  # the next may lie where this one does
            if left != 0:
                await self._let_others()
        if chunked and not transport.is_closing():  # the client may have left behind the last of them
            transport.write(b"0\r\n\r\n")
        return size

    def _send_whole(self, response: Response, visit: RequestContext) -> int:
        """Write an answer that is no tensor, and return how many bytes follow its head."""
        self.transport.write(
            self._head(response.status_code, lines_of(response.raw_headers), visit) + bytes(response.body)
        )
        return len(response.body)

    def _head(self, status: int, headers: bytes, visit: RequestContext) -> bytes:
        """Return the head of an answer with such lines of headers."""
        defaults = self.server_state.default_headers
        if defaults is not self._defaults:  # they change once a second
            self._defaults, self._default_lines = defaults, lines_of(defaults)
        end = b"\r\n" if self._turn.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINE[status], self._default_lines, headers, visit.lines(), end))

    async def _let_others(self) -> None:
        """Wait until more can be written, and let others have a turn at least."""
        if self.flow.write_paused:
            await self.flow.drain()
        else:
            await asyncio.sleep(0)

    def _end(self) -> None:
        """Say that the answer is written."""
        if self.transport.is_closing():
            return
        if self.flow.write_paused:  # who sends and does not read is held back
            drive(self._end_when_read(), copy_context(), self.tasks)
            return
        self._turn.response_complete = True
        if not self._turn.keep_alive:
            self.transport.close()
        self.on_response_complete()

    async def _end_when_read(self) -> None:
        await self.flow.drain()
        self._end()

    def _break_off(self, visit: RequestContext) -> None:
        """Let the client know that no more comes, the answer having begun."""
        LOG.exception("an answer was broken off", extra={"request_id": visit.text})
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream that the connection was."""
        super().connection_lost(exc)
        if self.cycle is not None and (lifetime := self.cycle.scope["state"].get(LIFETIME)):
            lifetime.end("left")

    def shutdown(self) -> None:
        """End the streams; a request of which the head has come is still answered."""
        if self._held:
            assert self._last is not None
            super().data_received(self._last.head)
        super().shutdown()
        self.app_state["streams"].drain()


def _ended(visit: RequestContext, status: int, error: Exception | None = None) -> None:
    """End the span of a request, if it has one; after an `error` no more of its answer came."""
    if visit.trace is not None:
        answered(visit.trace, status)
        ended(visit.trace, error)


async def _nothing() -> Any:
    """Receive nothing more: the body is there."""
    raise RuntimeError("a body that was received")


async def _nobody(*_: object) -> None:
    """Answer nothing: what stands before it is asked alone."""


class WebSocket(BoundedWebSocket):
    """A WebSocket. Plain steps of a decode stream are answered here, without a message of ASGI each.

    A stream may say where it is before it is closed.
    """

    _session: DecodeSession | None = None
    _lifetime: StreamLifetime
    _context: Context
    _run: FastRun | None = None
    _later: bytes = b""

    def handle_connect(self, event: Request) -> None:
        """Let the application know the connection."""
        super().handle_connect(event)
        if self.response.status_code == SWITCHING_PROTOCOLS:
            self.scope["state"][CONNECTION] = self

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer plain steps of the session until told otherwise, as whoever asks now; None does so."""
        self._session, self._lifetime, self._context = session, lifetime, copy_context()

    def data_received(self, data: bytes) -> None:
        """Answer a plain step that came alone, or leave what came to others."""
        if self._run is not None:  # no message overtakes another
            self._later += data
            self.transport.pause_reading()
        elif not self._begin(data):
            super().data_received(data)

    def _begin(self, data: bytes) -> bool:
        """Begin to answer, if all that is waited for is a plain step, and this is one."""
        session = self._session
        if (
            session is None
            or len(data) < SHORTEST
            or data[0] != BINARY
            or not self.queue.empty()
            or not self.writable.is_set()
            or self.conn.reader.buffer
            or self.frames
            or self.turns.rest
        ):
            return False
        start = 6 if data[1] < MASKED + 126 else 8
        length = data[1] - MASKED if start == 6 else int.from_bytes(data[2:4], "big")
        if data[1] >= MASKED + 127 or len(data) != start + length:
            return False
        if not self._lifetime.touch():
            return False
        run = self._context.run(session.begin, apply_mask(data[start:], data[start - 4 : start]))
        if run is None:
            return False
        self._run = run
        self.loop.call_soon(self._finish, session, run)
        return True

    def _finish(self, session: DecodeSession, run: FastRun) -> None:
        """Write the answer, unless the stream was ended in the meantime."""
        self._run = None
        try:
            head, vectors = session.finish(run)
        except Exception:
            LOG.exception("a step failed in an unforeseen way")
            run.fail(session.visit, "internal_error")
            self.transport.abort()
            return
        size, began = 0, perf_counter()
        if self._session is session and not self.transport.is_closing():
            size = len(head) + vectors.nbytes
            before = struct.pack("!BBH", BINARY, 126, size) if size < 2**16 else struct.pack("!BBQ", BINARY, 127, size)
            self.transport.write(b"".join((before, head, vectors.data)))
        session.end(run, size, perf_counter() - began)
        if self._later:
            later, self._later = self._later, b""
            if self.writable.is_set() and not self.read_paused:  # else whoever paused it resumes it
                self.transport.resume_reading()
            self.data_received(later)

    def shutdown(self) -> None:
        """Let the stream close the connection; without one, close it."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        self.app_state["streams"].drain()
