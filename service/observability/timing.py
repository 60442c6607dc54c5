"""Requests while they are answered: how long each takes, as its protocol and as the model that it asks sees it."""

import time
from typing import Protocol

from preblock.service.core.errors import ClientFault, PreblockError
from preblock.service.observability.context import CURRENT_REQUEST, current_trace

QUEUE, INPUT, INFER, OUTPUT = "queue", "compute_input", "compute_infer", "compute_output"
PHASES = (INPUT, QUEUE, INFER, OUTPUT)
"""The phases of an execution: what is asked for is checked, waits for a thread, runs, and is made what was wanted."""


OPENING = "-open"
"""Ends the name of a protocol where a stream is opened, whose first step is a request of its own."""


class Counts(Protocol):
    """What counts requests once they are answered (`service/observability/metrics.py`)."""

    def asked(self, protocol: str, model: str, outcome: str, seconds: float) -> None:
        """Count a request of a protocol."""

    def parsed(self, protocol: str, seconds: float) -> None:
        """Count the time until what a request asks was checked."""

    def executed(self, execution: "RunTimer", success: bool, end: float) -> None:
        """Count a request to a model that ended at `end`, of the clock of its marks."""


class RequestTimer:
    """One request of a protocol, or a step of a stream, while the block runs; an error that leaves it is its outcome.

    `model` is what the protocol learns while it answers; `outcome` and `seconds` are there after it.

    Args:
        counts: it.
        protocol: by which it came.

    """

    __slots__ = ("_begin", "_counts", "model", "outcome", "protocol", "seconds")

    def __init__(self, counts: Counts, protocol: str) -> None:
        self._counts, self.protocol, self.model = counts, protocol, ""

    def __enter__(self) -> "RequestTimer":
        """Begin."""
        self._begin = time.perf_counter()
        if (visit := CURRENT_REQUEST.get()) is not None:
            visit.ids = None  # those of a step before
            visit.protocol = self.protocol.removesuffix(OPENING)  # what follows is of the protocol that was opened
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Count the request."""
        self.outcome = "ok" if kind is None else _outcome(kind)
        self.seconds = time.perf_counter() - self._begin
        self._counts.asked(self.protocol, self.model, self.outcome, self.seconds)
        if kind is None and not self.protocol.endswith(OPENING):
            self._count_parsing()
        if (trace := current_trace()) is not None:
            if self.model:
                trace.attributes["preblock.model"] = self.model
            if kind is not None:
                trace.refused(self.outcome, issubclass(kind, Exception) and not issubclass(kind, ClientFault))

    def _count_parsing(self) -> None:
        """Count how long it took to read and check what was asked of a model, if anything was."""
        visit = CURRENT_REQUEST.get()
        if visit is not None and len(visit.marks) > 1 and visit.marks[1] > self._begin:
            self._counts.parsed(self.protocol, visit.marks[1] - self._begin)


def _outcome(kind: type[BaseException]) -> str:
    if issubclass(kind, PreblockError):
        return kind.__name__
    return "internal_error" if issubclass(kind, Exception) else "cancelled"


class RunTimer:
    """One request to a model while the block runs, and the phases of it as they pass.

    `rows` are those of the request. `batch` counts the rows of the run of the model, those of other requests included;
    it is 0 in a request that joined the run of another. Where `goes_on` was set, the execution does not end with the
    block, but by `end`.

    Args:
        counts: it.
        model: that is asked.
        version: of the model.

    """

    __slots__ = ("_counts", "batch", "goes_on", "marks", "model", "rows", "version")

    def __init__(self, counts: Counts, model: str, version: int) -> None:
        self._counts, self.model, self.version = counts, model, version
        self.rows = self.batch = 0
        self.goes_on = False
        self.marks = [time.perf_counter()]

    def __enter__(self) -> "RunTimer":
        """Begin."""
        return self

    def passed(self) -> None:
        """Say that the next of the phases is over: `PHASES` has their order."""
        self.marks.append(time.perf_counter())

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Count the request; whatever leaves the block as an exception has failed."""
        if not self.goes_on:
            self.end(kind is None)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.marks[0]

    def end(self, success: bool) -> None:
        """Count the request."""
        self._counts.executed(self, success, time.perf_counter())
