"""Admission of requests: limits before the work; metrics, access log and span after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from preblock.service.core.errors import ClientFault
from preblock.service.core.limits import Limits
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from preblock.service.observability.record import RequestRecord


class Admission:
    """Admits requests of all protocols within the limits, and reports each when it ends.

    Args:
        limits: of concurrent requests and of requests per second.
        metrics: counts every record.
        log: writes a line for some of them.

    """

    def __init__(self, limits: Limits, metrics: Metrics, log: AccessLog) -> None:
        self.limits, self._metrics, self.log = limits, metrics, log

    @contextmanager
    def request(self, protocol: str, limited: bool = True) -> Iterator[RequestRecord]:
        """Admit a request, or a step of a stream, for as long as the block runs; an exception is its outcome.

        A deferred record ends with its answer, after the block. With `limited` false no limit holds.

        Raises:
            RateLimited: the caller asks too often.
            Unavailable: too many requests are being answered.

        """
        record = RequestRecord(protocol, CURRENT_REQUEST.get())
        try:
            if limited:
                self.enter(record)
            yield record
        except BaseException as error:
            self.end(record, error)
            raise
        self._leave(record)
        if not record.deferred:
            self.end(record)

    def enter(self, record: RequestRecord) -> None:
        """Admit a request; raises as `request` does. `end` must follow."""
        self.limits.enter()
        record.admitted = True

    def end(self, record: RequestRecord, error: BaseException | None = None) -> None:
        """End a request with success or with `error`, and report it. A second call does nothing."""
        if record.outcome:
            return
        self._leave(record)
        record.end(error)
        self._metrics.record(record)
        context = record.context
        if context is not None and context.trace is not None:
            context.trace.add(record, isinstance(error, Exception) and not isinstance(error, ClientFault))
        if self.log.sample_rate:
            self.log.write(record)
        record.context = None  # the context holds the record: without a cycle, both are freed at once

    def _leave(self, record: RequestRecord) -> None:
        if record.admitted:
            record.admitted = False
            self.limits.leave()
