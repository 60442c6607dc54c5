"""A request as those who run the service see it: its id in answers and log lines, and where its time went."""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from time import perf_counter

from preblock.service.observability.record import OK, OPENING, RequestRecord

ID, TIMING = b"x-request-id", b"server-timing"
PER_REQUEST_HEADERS = frozenset(
    {
        ID,
        b"traceparent",
        b"tracestate",
        b"baggage",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-real-ip",
    }
)
"""Headers that say which request it is, or whose, and nothing of what is asked."""
_ALLOWED = re.compile(rb"[!-~]{1,128}")
"""Visible ASCII: neither a header nor a line of a log can be forged by it."""

_PREFIX: bytes
_NUMBERS: Iterator[int]


def _begin() -> None:
    """Draw what the ids of this process begin with: nobody else counts behind the same random bits."""
    global _PREFIX, _NUMBERS
    _PREFIX, _NUMBERS = secrets.token_hex(8).encode(), count()


_begin()
os.register_at_fork(after_in_child=_begin)

Headers = Iterable[tuple[bytes, bytes]]
Attributes = Mapping[str, str | int | float]


@dataclass(eq=False, slots=True)
class SpanData:
    """What the span of a request will say, gathered until it ends.

    Args:
        number: of the trace; 0 where there is none.
        name: of the span.
        attributes: of the span, none of which holds a token id or text.
        tell: ends the span, which says what is gathered; None where it was not chosen to be sent.
        failed: whether the service is at fault.
        runs: how often a model ran for it.
        rows: that were answered.
        tokens: that were embedded.

    """

    number: int
    name: str
    attributes: dict[str, str | int | float]
    tell: Callable[["SpanData"], None] | None = None
    failed: bool = False
    runs: int = 0
    rows: int = 0
    tokens: int = 0

    @property
    def id(self) -> str:
        """The number in hexadecimal, as the specification of traces writes it; empty where there is none."""
        return f"{self.number:032x}" if self.number else ""

    def add(self, record: RequestRecord, failed: bool) -> None:
        """Add a request or a step that has ended; `failed` says whether the service is at fault."""
        if record.model:
            self.attributes["preblock.model"] = record.model
        if record.outcome != OK:
            self.refused(record.outcome, failed)
        elif record.tokens:
            self.runs += 1
            self.rows += record.rows
            self.tokens += record.tokens

    def refused(self, error: str, failed: bool) -> None:
        """Say which kind of error the request, or a step of it, was answered with."""
        self.attributes["error.type"] = error
        self.failed = self.failed or failed

    def end(self) -> None:
        """End the span."""
        # Which knows the visit, as that knows this: garbage that nobody looks for soon.
        tell, self.tell = self.tell, None
        if tell is not None:
            tell(self)


Begin = Callable[["RequestContext", Headers, str, Attributes], SpanData]
"""Begins to trace a visit, and lets it know: takes its headers, the name of its span, and what that says at once."""


class RequestContext:
    """One request of a connection, or one stream with all of its steps.

    Attributes:
        record: of the request, or of the stream's last step; None before either begins.
        received: bytes of a body that came whole.
        read: seconds until that body had come.
        trace: the span's data; None where requests are not traced.

    Args:
        wanted: the id that the client gives it; one that is not 1 to 128 visible characters of ASCII is not taken.
        began: when its head came, of `perf_counter`; default: now.

    """

    __slots__ = ("began", "id", "read", "received", "record", "trace")

    def __init__(self, wanted: bytes | None = None, began: float | None = None) -> None:
        self.id = wanted if wanted is not None and _ALLOWED.fullmatch(wanted) else b"%b-%x" % (_PREFIX, next(_NUMBERS))
        self.began = perf_counter() if began is None else began
        self.received, self.read = 0, 0.0
        self.record: RequestRecord | None = None
        self.trace: SpanData | None = None

    @classmethod
    def of(cls, headers: Headers, began: float | None = None) -> "RequestContext":
        """Return the visit of a request with such headers, of which the first that names an id counts."""
        return cls(wanted((name.lower(), value) for name, value in headers), began)

    @property
    def text(self) -> str:
        """The id as text."""
        return self.id.decode("ascii")

    @property
    def protocol(self) -> str:
        """The protocol of the request or stream; empty before its record begins."""
        return "" if self.record is None else self.record.protocol.removesuffix(OPENING)

    def stages(self) -> dict[str, float]:
        """Return the seconds of each stage until now; the first includes the reading. Empty before a run."""
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
        """Return the headers of this request that every response has, with HTTP and with gRPC."""
        timing = self._timing()
        return [(ID, self.id), (TIMING, timing)] if timing else [(ID, self.id)]

    def lines(self) -> bytes:
        """Return the headers as lines of HTTP/1.1."""
        return b"".join([b"%b: %b\r\n" % pair for pair in self.headers()])

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers as metadata of gRPC."""
        return tuple((name.decode(), value.decode()) for name, value in self.headers())

    def _timing(self) -> bytes:
        """Return what took how long until now, in milliseconds, as `Server-Timing` has it; nothing before a run."""
        record = self.record
        if record is None or not record.checked:
            return b""
        parse = _milliseconds(record.checked - self.began)
        if not record.ran:  # a large answer is computed while it is sent
            return b"parse;dur=%b" % parse
        times = parse, _milliseconds(record.dequeued - record.checked), _milliseconds(record.ran - record.dequeued)
        return b"parse;dur=%b, queue;dur=%b, run;dur=%b" % times


def wanted(headers: Headers) -> bytes | None:
    """Return the id that headers, whose names are in lower case, give their request: the first counts."""
    for name, value in headers:
        if name == ID:
            return value
    return None


def _milliseconds(seconds: float) -> bytes:
    """Return a time in milliseconds, to the microsecond."""
    return _thousandths(int(1e6 * seconds))


@lru_cache(2**12)  # writing a fraction takes ten times as long as looking a usual one up
def _thousandths(count: int) -> bytes:
    return b"%.3f" % (count / 1000)


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("visit", default=None)
"""The request that is answered, where one is."""
