"""Admission of requests: limits before the work; metrics, access log and span after it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from preblock.service.core.auth import caller
from preblock.service.core.errors import ClientFault, RateLimited, Unavailable
from preblock.service.core.large_bodies import BodyMemory, IncomingMemory, ResponseMemory, WriteTurns
from preblock.service.core.settings import LiveSettings
from preblock.service.core.system import return_free_memory
from preblock.service.core.types import FLOAT32_BYTES
from preblock.service.observability.context import CURRENT_REQUEST, RequestRecord
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics

MAX_ROUNDING_SECONDS = 1e-6
"""Error of sums of fractions of a second."""
SWEEP_INTERVAL_SECONDS = 10.0
"""Interval at which callers with unused quota are forgotten."""
COMMON_INPUTS = 5
"""Inputs with a value for each token in every model: ids, positions, mask, segments and offsets."""
MIN_PARSED_VALUES = 2**18
"""Values that a request may always have: parsing them takes little time."""


class Limits:
    """The limits of this process, by the current settings.

    Args:
        settings: with the limits.
        free: returns the free memory of large responses to the system; default: that of the allocator.

    Attributes:
        incoming: memory of large request bodies while they arrive.
        bodies: memory of complete ones.
        responses: memory of large responses.
        turns: turns of large responses that are computed while they are sent.

    """

    def __init__(self, settings: LiveSettings, free: Callable[[], None] = return_free_memory) -> None:
        self._settings = settings
        self.bodies, self.responses = BodyMemory(settings), ResponseMemory(settings, free)
        self.incoming, self.turns = IncomingMemory(settings, self.bodies.drop), WriteTurns()
        self._running = 0
        # By caller: the theoretical arrival time of its next request.
        self._arrivals: dict[str, float] = {}
        self._swept = time.monotonic()

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body."""
        return self._settings.current.max_body_bytes

    def enter(self) -> None:
        """Begin a request; `leave` must follow.

        Raises:
            RateLimited: the caller exceeds its request rate.
            Unavailable: too many requests are in flight.

        """
        limits = self._settings.requests
        most, rate = limits.concurrent, limits.rate
        if self._running >= most:  # checked first: a request rejected here uses no quota of its caller
            message = f"the limit of {most} requests at a time is reached; try again later"
            raise Unavailable("requests", f"more than {most} at a time", f"at most {most}", message=message)
        if rate is not None:
            self._count(caller().name, rate, time.monotonic())
        self._running += 1

    def admits(self) -> bool:
        """Return whether `enter` would begin a request now; it is not counted."""
        limits, rate = self._settings.requests, self._settings.requests.rate
        if self._running >= limits.concurrent:
            return False
        return rate is None or self._wait(caller().name, rate, time.monotonic()) <= MAX_ROUNDING_SECONDS

    def leave(self) -> None:
        """End a request."""
        self._running -= 1

    @contextmanager
    def extend(self) -> Iterator[None]:
        """Count an answered request while the rest of its response is sent."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def max_parsed_values(self, indices: int = 0) -> int:
        """Return the maximum values in JSON or Protocol Buffers, for a model with `indices` further inputs."""
        return max(MIN_PARSED_VALUES, (COMMON_INPUTS + indices) * self._settings.current.max_request_tokens)

    def _count(self, name: str, rate: float, now: float) -> None:
        """Count a request of a caller, by the generic cell rate algorithm (ITU-T I.371)."""
        if now - self._swept > SWEEP_INTERVAL_SECONDS:
            self._arrivals = {name: arrival for name, arrival in self._arrivals.items() if arrival > now}
            self._swept = now
        arrival = self._arrivals[name] = self._arrival(name, rate, now)
        wait = self._wait(name, rate, now)
        if wait > MAX_ROUNDING_SECONDS:
            raise _too_many(rate, math.ceil(wait))
        self._arrivals[name] = arrival + 1 / rate

    def _arrival(self, name: str, rate: float, now: float) -> float:
        """Return the theoretical arrival time of the next request of a caller."""
        # The rate may have been lower before: a caller waits for at most a second, or for one interval.
        return min(max(self._arrivals.get(name, now), now), now + max(1, 1 / rate))

    def _wait(self, name: str, rate: float, now: float) -> float:
        """Return the seconds until a caller may send a request; all requests of a second may come at once."""
        return self._arrival(name, rate, now) - now - max(1 - 1 / rate, 0)


def _too_many(rate: float, seconds: int) -> RateLimited:
    """Return the error for more than `rate` requests a second, which may be sent again after `seconds`."""
    message = f"more than {rate:g} requests a second; try again in {seconds} s"
    error = RateLimited("requests", f"more than {rate:g} a second", f"at most {rate:g} a second", message=message)
    error.retry_after = seconds
    return error


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
        if self.log.settings.current.access_log_sample_rate:
            self.log.write(record)
        record.context = record.ids = None  # breaks the reference cycle, so that both are freed at once

    def _leave(self, record: RequestRecord) -> None:
        if record.admitted:
            record.admitted = False
            self.limits.leave()
        if record.body_bytes:
            self.limits.bodies.release(record.body_bytes)
            record.body_bytes = 0
