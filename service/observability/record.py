"""Records of requests, from which counters, histograms, access log, `Server-Timing` and spans derive."""

from time import perf_counter
from typing import TYPE_CHECKING

from preblock.service.core.errors import PreblockError

if TYPE_CHECKING:
    from preblock.service.observability.context import RequestContext

OPENING_SUFFIX = "-open"
"""Suffix of the protocol for the request to open a stream. Each step of the stream has a record of its own."""
PROTOCOLS = (
    *("native", "open-inference", "openai", "tei", "bias", "positions", "neighbours", "grpc", "grpc-stream"),
    *("decode", f"decode{OPENING_SUFFIX}"),
)
OK, INTERNAL_ERROR, CANCELLED = "ok", "internal_error", "cancelled"


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
        ids: token ids for the access log, by row; None if the log has none.
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
        self.ids: list[list[int]] | None = None
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
