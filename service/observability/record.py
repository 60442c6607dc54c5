"""Records of requests, from which counters, histograms, access log, `Server-Timing` and spans derive."""

from time import perf_counter
from typing import TYPE_CHECKING

from preblock.service.core.errors import PreblockError

if TYPE_CHECKING:
    from preblock.service.observability.context import RequestContext

OPENING = "-open"
"""Ends the protocol of a request that opens a stream; each step of the stream has a record of its own."""
OK, INTERNAL_ERROR, CANCELLED = "ok", "internal_error", "cancelled"


class RequestRecord:
    """One request, or one step of a stream.

    Timestamps are seconds of `time.perf_counter`; 0 stands for a moment that has not come. Each path sets them when the
    request reaches that moment. The engine's admission sets `outcome` and hands the record to the metrics, the access
    log and the span.

    Attributes:
        protocol: `native`, `open-inference`, `openai`, `bias`, `grpc`, `grpc-stream`, `decode` or `decode-open`.
        context: the connection's request, or the stream, that the record belongs to; None outside of a server.
        admitted: whether the record counts against the limit of concurrent requests.
        deferred: whether the answer is computed after the handler has returned, while the answer is sent.
        model: name of the model; empty until it is found.
        version: of the model.
        operation: name of a stream's operation; empty for all other requests.
        rows: of the request.
        tokens: embedded for the request.
        batch: rows of the model run, other requests included; 0 where another request of the run counts them.
        ids: token ids for the access log, by row; None where the log writes none.
        started: the request begins to be read.
        asked: the model is asked.
        checked: the request is validated.
        dequeued: the run begins.
        ran: the run is over.
        ended: the answer is ready, or the request has failed.
        outcome: `ok`, the class of the error, `internal_error` or `cancelled`; empty until the end.

    """

    __slots__ = (
        *("protocol", "context", "admitted", "deferred", "model", "version", "operation", "rows", "tokens", "batch"),
        *("ids", "started", "asked", "checked", "dequeued", "ran", "ended", "outcome"),
    )

    def __init__(self, protocol: str, context: "RequestContext | None" = None, started: float | None = None) -> None:
        self.protocol, self.context = protocol, context
        self.admitted = self.deferred = False
        self.model = self.operation = self.outcome = ""
        self.version = self.rows = self.tokens = self.batch = 0
        self.ids: list[list[int]] | None = None
        self.started = perf_counter() if started is None else started
        self.asked = self.checked = self.dequeued = self.ran = self.ended = 0.0
        if context is not None:
            context.record = self

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end."""
        return self.ended - self.started

    def ask(self, model: str, version: int) -> None:
        """Note that the request asks a model."""
        self.model, self.version, self.asked = model, version, perf_counter()

    def end(self, error: BaseException | None) -> None:
        """Set the outcome: `error` is the exception that ended the request, None after success."""
        if error is None:
            self.outcome = OK
        elif isinstance(error, PreblockError):
            self.outcome = type(error).__name__
        else:
            self.outcome = INTERNAL_ERROR if isinstance(error, Exception) else CANCELLED
        if error is not None or not self.ended:
            self.ended = perf_counter()
