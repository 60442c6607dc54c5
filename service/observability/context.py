"""A request of a connection: its context with id, trace and memory, and its records.

Counters, histograms, access log, `Server-Timing` and spans derive from a record. A stream has a record for each step.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from time import perf_counter

from preblock.service.core.errors import PreblockError
from preblock.service.core.large_bodies import BodyMemory
from preblock.service.core.types import Int64, TokenRows

ID, TIMING = b"x-request-id", b"server-timing"
PER_REQUEST_HEADERS = frozenset(
    (
        *(ID, b"traceparent", b"tracestate", b"baggage"),
        *(b"forwarded", b"x-forwarded-for", b"x-forwarded-proto", b"x-real-ip"),
    )
)
"""Headers that identify a request or its client. They do not change the rest of the response."""
_ALLOWED = re.compile(rb"[!-~]{1,128}")
"""Visible ASCII: such an id cannot forge a header or a log line."""

_PREFIX: bytes
_NUMBERS: Iterator[int]


def _seed_ids() -> None:
    """Draw a random prefix for the request ids of this process."""
    global _PREFIX, _NUMBERS
    _PREFIX, _NUMBERS = secrets.token_hex(8).encode(), count()


_seed_ids()
os.register_at_fork(after_in_child=_seed_ids)

OPENING_SUFFIX = "-open"
"""Suffix of the protocol for the request to open a stream. Each step of the stream has a record of its own."""
PROTOCOLS = (
    *("native", "open-inference", "openai", "tei", "bias", "positions", "neighbours", "grpc", "grpc-stream"),
    *("decode", f"decode{OPENING_SUFFIX}"),
)
OK, INTERNAL_ERROR, CANCELLED = "ok", "internal_error", "cancelled"

Target = tuple[str, str, str]
"""Method, path and client of a request."""
Headers = Iterable[tuple[bytes, bytes]]
"""Names and values of headers. Names are in lower case, except in a request before ASGI."""
Attributes = Mapping[str, str | int | float]


class RequestRecord:
    """One request, or one step of a stream.

    Timestamps are seconds of `time.perf_counter`, and 0 before the request reaches that point. The engine's admission
    sets `outcome` and passes the record to the metrics, the access log and the span.

    Attributes:
        protocol: one of `PROTOCOLS`.
        context: context of the request or stream; None outside of a server.
        admitted: whether the record counts against the limit of concurrent requests.
        body_bytes: memory reserved for the body, released when the handler returns.
        copies: memory that the response takes until it is sent, in sizes of its vectors as float32.
        running: whether the metrics count it as running.
        deferred: whether the response is computed while it is sent, after the handler has returned.
        model: name of the model; empty until it is selected.
        version: of the model.
        operation: name of a stream's operation; empty for all other requests.
        rows: of the request.
        tokens: embedded for the request.
        batch: rows of the model run, other requests included; 0 if another request of the batch counts them.
        ids: of the request, for the access log; None before they are known, and after the end.
        started: the reading of the request begins.
        selected: the model is found.
        checked: the request is validated.
        dequeued: the run begins.
        ran: the run is over.
        ended: the response is ready, or the request has failed.
        outcome: `ok`, the class of the error, `internal_error` or `cancelled`; empty until the end.

    """

    __slots__ = (
        *("protocol", "context", "admitted", "running", "body_bytes", "copies", "deferred", "model", "version"),
        *(
            "operation",
            "rows",
            "tokens",
            "batch",
            "ids",
            "started",
            "selected",
            "checked",
            "dequeued",
            "ran",
            "ended",
            "outcome",
        ),
    )

    def __init__(self, protocol: str, context: "RequestContext | None" = None, started: float | None = None) -> None:
        self.protocol, self.context = protocol, context
        self.admitted = self.running = self.deferred = False
        self.model = self.operation = self.outcome = ""
        self.body_bytes = self.version = self.rows = self.tokens = self.batch = 0
        self.copies = 1
        self.ids: TokenRows | Int64 | None = None
        self.started = perf_counter() if started is None else started
        self.selected = self.checked = self.dequeued = self.ran = self.ended = 0.0
        if context is not None:
            context.record = self

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end."""
        return self.ended - self.started

    def select(self, model: str, version: int) -> None:
        """Set the model of the request."""
        self.model, self.version, self.selected = model, version, perf_counter()

    def end(self, error: BaseException | None) -> None:
        """Set the outcome. `error` is the exception of a failed request, None after success."""
        if error is None:
            self.outcome = OK
        elif isinstance(error, PreblockError):
            self.outcome = type(error).__name__
        else:
            self.outcome = INTERNAL_ERROR if isinstance(error, Exception) else CANCELLED
        if error is not None or not self.ended:
            self.ended = perf_counter()


@dataclass(eq=False, slots=True)
class SpanData:
    """The data of a request's span, collected until the span ends.

    Args:
        id: of the trace, in hexadecimal; empty without one.
        name: of the span.
        attributes: of the span, without token ids and text.
        on_end: ends the span with this data; None if the span is not sampled.
        failed: whether the service is at fault.
        runs: number of successful model runs.
        rows: embedded rows.
        tokens: embedded tokens.

    """

    id: str
    name: str
    attributes: dict[str, str | int | float]
    on_end: Callable[["SpanData"], None] | None = None
    failed: bool = False
    runs: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, record: RequestRecord, failed: bool) -> None:
        """Add a request or a step that has ended; `failed` tells whether the service is at fault."""
        if record.model:
            self.attributes["preblock.model"] = record.model
        if record.outcome != OK:
            self.set_error(record.outcome, failed)
        elif record.tokens:
            self.runs += 1
            self.rows += record.rows
            self.tokens += record.tokens

    def set_error(self, error: str, failed: bool) -> None:
        """Set the kind of error of the request or of one of its steps."""
        self.attributes["error.type"] = error
        self.failed = self.failed or failed

    def end(self) -> None:
        """End the span."""
        # `on_end` holds the request context, and the context holds this object: a cycle would delay their release.
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)


Begin = Callable[["RequestContext", Headers, str, Attributes], SpanData]
"""Starts a span for a request. Arguments: context, headers, span name, initial attributes."""


class RequestContext:
    """One request of a connection, or one stream with all of its steps.

    Attributes:
        record: of the request, or of the stream's last step; None before either begins.
        received: bytes of a buffered body.
        read: seconds to receive that body.
        trace: the span's data; None without tracing.
        target: method, path and client; None outside of a server.
        status: of the response, or a name of gRPC; None before it is known.
        on_status: calls to make once the status is known, in order; a stream may take its first step before.
        on_disconnect: called when the client disconnects; None if nothing waits for it.
        held: bytes of memory reserved for the response; 0 for a small one.

    Args:
        request_id: id from the client. An id other than 1 to 128 visible ASCII characters is replaced.
        began: timestamp of `perf_counter` at the arrival of the headers; default: now.

    """

    __slots__ = (
        *("began", "id", "on_disconnect", "on_status", "read", "received", "record", "status", "target", "trace"),
        *("_memory", "held"),
    )

    def __init__(self, request_id: bytes | None = None, began: float | None = None) -> None:
        if request_id is None or not _ALLOWED.fullmatch(request_id):
            request_id = b"%b-%x" % (_PREFIX, next(_NUMBERS))
        self.id = request_id
        self.began = perf_counter() if began is None else began
        self.received, self.read = 0, 0.0
        self.record: RequestRecord | None = None
        self.trace: SpanData | None = None
        self.target: Target | None = None
        self.status: int | str | None = None
        self.on_status: tuple[Callable[[], None], ...] = ()
        self.on_disconnect: Callable[[], None] | None = None
        self._memory: BodyMemory | None = None
        self.held = 0

    def hold(self, memory: BodyMemory, size: int) -> None:
        """Keep `size` bytes reserved in `memory` until `release`."""
        self._memory = memory
        self.held += size

    def keep(self, size: int) -> None:
        """Release all but `size` bytes of the memory of the response: those that its client has still to read."""
        if self._memory is not None and self.held > size:
            released, self.held = self.held - size, size
            self._memory.release(released)

    def release(self) -> None:
        """Release the memory of the response. The transport calls this when the client has read it, or has left."""
        self.keep(0)

    def set_status(self, status: int | str) -> None:
        """Set the status of the response."""
        self.status = status
        calls, self.on_status = self.on_status, ()
        for call in calls:
            call()

    @classmethod
    def of(cls, headers: Headers, began: float | None = None) -> "RequestContext":
        """Return the context of a request with these headers; the first id counts."""
        return cls(find_request_id((name.lower(), value) for name, value in headers), began)

    @property
    def text(self) -> str:
        """The id as text."""
        return self.id.decode("ascii")

    @property
    def protocol(self) -> str:
        """The protocol of the request or stream; empty before its record begins."""
        return "" if self.record is None else self.record.protocol.removesuffix(OPENING_SUFFIX)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage until now; parsing includes reading. Empty before a run."""
        record = self.record
        if record is None or not record.ran:
            return {}
        return {
            "parse": record.checked - self.began,
            "queue": record.dequeued - record.checked,
            "run": record.ran - record.dequeued,
            "send": perf_counter() - (record.ended or record.ran),
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers of this request, for HTTP and for gRPC."""
        timing = self._timing()
        return [(ID, self.id), (TIMING, timing)] if timing else [(ID, self.id)]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers as metadata of gRPC."""
        return tuple((name.decode(), value.decode()) for name, value in self.headers())

    def _timing(self) -> bytes:
        """Return the stages until now, in milliseconds, as a `Server-Timing` header; empty before validation."""
        record = self.record
        if record is None or not record.checked:
            return b""
        parse = 1e3 * (record.checked - self.began)
        if not record.ran:  # a streamed response is computed while it is sent
            return b"parse;dur=%.3f" % parse
        queue, run = 1e3 * (record.dequeued - record.checked), 1e3 * (record.ran - record.dequeued)
        return b"parse;dur=%.3f, queue;dur=%.3f, run;dur=%.3f" % (parse, queue, run)


def find_request_id(headers: Headers) -> bytes | None:
    """Return the first request id of headers with lower-case names, or None."""
    for name, value in headers:
        if name == ID:
            return value
    return None


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""The context of the request in progress, if there is one."""
