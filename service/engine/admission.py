"""Admission of requests: limits before the work; metrics, access log and span after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from preblock.service.core.errors import ClientFault
from preblock.service.core.limits import Limits
from preblock.service.core.types import FLOAT32_BYTES
from preblock.service.observability.context import CURRENT_REQUEST, RequestRecord
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics


class Admission:
    """Admits requests of all protocols within the limits, and reports each request at its end.

    Args:
        limits: limits of concurrent requests and of requests per second.
        metrics: counts every record.
        log: writes a line for a sample of the records.

    """

    def __init__(self, limits: Limits, metrics: Metrics, log: AccessLog) -> None:
        self.limits, self._metrics, self.log = limits, metrics, log

    @contextmanager
    def request(self, protocol: str, limited: bool = True) -> Iterator[RequestRecord]:
        """Admit a request, or a step of a stream, for the time of the block; an exception becomes its outcome.

        A deferred record ends with its response, after the block. If `limited` is false, no limit applies.

        Raises:
            RateLimited: the caller has sent too many requests in this second.
            Unavailable: too many requests are in flight.

        """
        record = RequestRecord(protocol, CURRENT_REQUEST.get())
        try:
            if limited:
                self.enter(record)
            else:
                self._metrics.start(record)
            yield record
        except BaseException as error:
            self.end(record, error)
            raise
        self._leave(record)
        if not record.deferred:
            self.end(record)

    def enter(self, record: RequestRecord) -> None:
        """Admit a request, with the errors of `request`; the caller must call `end` later."""
        self.limits.enter()
        record.admitted = True
        self._metrics.start(record)

    async def reserve(self, record: RequestRecord, size: int) -> None:
        """Reserve memory for the body of an admitted request, until its handler returns.

        Raises:
            Unavailable: too many large bodies wait, or for too long.

        """
        record.body_bytes = await self.limits.bodies.reserve(size)

    async def reserve_response(self, record: RequestRecord, values: int) -> None:
        """Reserve memory for a response with `values` in memory, until its transport releases the request's context.

        Raises:
            Unavailable: too many large responses wait, or for too long.

        """
        if record.context is not None:  # outside of a server no transport sends the response
            size = FLOAT32_BYTES * record.copies * values
            record.context.hold(self.limits.responses, await self.limits.responses.reserve(size))

    def take_response(self, record: RequestRecord, values: int) -> bool:
        """Reserve memory as `reserve_response`; return False in place of a wait."""
        if record.context is not None:
            size = self.limits.responses.take(FLOAT32_BYTES * record.copies * values)
            if size is None:
                return False
            if size:
                record.context.hold(self.limits.responses, size)
        return True

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
        record.context = record.ids = None  # breaks the reference cycle, so that both are freed at once

    def _leave(self, record: RequestRecord) -> None:
        if record.admitted:
            record.admitted = False
            self.limits.leave()
        if record.body_bytes:
            self.limits.bodies.release(record.body_bytes)
            record.body_bytes = 0
