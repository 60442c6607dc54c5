"""What is counted, and who is told of it: added up here, in the counters soon, and readable over several workers.

With several workers each keeps its numbers in files of the folder PROMETHEUS_MULTIPROC_DIR, and whoever is asked
sums over all of them.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from preblock.service.core.errors import Unavailable
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.observability.instruments import LARGEST_BATCH, MORE, SECONDS, Instruments
from preblock.service.observability.metric_files import FOLDER, _forget_dead
from preblock.service.observability.statistics import InferenceStatistics, history
from preblock.service.observability.timing import INFER, INPUT, OUTPUT, PHASES, QUEUE, RequestTimer, RunTimer
from preblock.service.observability.totals import COUNT, ROWS, TOTAL, RunTotals

TELL_SECONDS = 0.1
"""With several workers, how late a count may be seen by another."""
MOST_ANSWERED = 16
"""Requests that are kept before they are summed: one by one takes twice as long, and more would hold others up."""
FAILED = "failed"
"""In the place of a number of rows: those of executions that failed."""


class Metrics:
    """The metrics of this process.

    Args:
        more: what is found out when somebody asks; default: nothing.

    """

    def __init__(self, more: Collector | None = None) -> None:
        self._registry = CollectorRegistry()
        self._more = more
        if more is not None:
            self._registry.register(more)
        self._instruments = Instruments(self._registry)
        self._carried: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        self._counted: defaultdict[Counter, float] = defaultdict(float)
        self._answered: list[tuple[str, RunTimer, int, float, int, int, float, float, str]] = []
        self._sums: dict[tuple[str, str, int, int | str, str], RunTotals] = {}
        self._latencies: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (len(SECONDS) + 2))
        self._tallies: defaultdict[tuple[str, int, int | str], defaultdict[str, float]]
        self._tallies = defaultdict(lambda: defaultdict(float))
        self._asked: dict[tuple[str, int], float] = {}
        self._shared, self._telling = FOLDER in os.environ, False
        if self._shared:  # the first of a kind opens its file, for which there may be no descriptor later
            self._instruments.seconds("native")
            self._instruments.carried("native")

    def request(self, protocol: str) -> RequestTimer:
        """Return what counts and times one request of `protocol`."""
        return RequestTimer(self, protocol)

    def execution(self, model: str, version: int) -> RunTimer:
        """Return what counts and times one request to a model."""
        execution = RunTimer(self, model, version)
        if (visit := CURRENT_REQUEST.get()) is not None:
            visit.marks = execution.marks
        return execution

    def asked(self, protocol: str, model: str, outcome: str, seconds: float) -> None:
        """Count a request that was answered, and how long that took."""
        self._count(self._instruments.requests(protocol, model, outcome), 1)
        latencies = self._latencies[protocol]
        latencies[bisect_left(SECONDS, seconds)] += 1
        latencies[-1] += seconds

    def answered(
        self,
        protocol: str,
        execution: RunTimer,
        tokens: int,
        began: float,
        received: int = 0,
        sent: int = 0,
        read: float = 0,
        send: float = 0,
        operation: str = "",
    ) -> None:
        """Count all of a request that is answered, which took from its first mark to its last, soon.

        `began` is when all of it was there, of the clock of the marks. What follows it is as in `carried`; `operation`
        is that of a stream, if it is a message of one.
        """
        self._soon()
        self._answered.append((protocol, execution, tokens, began, received, sent, read, send, operation))
        if len(self._answered) == MOST_ANSWERED:  # behind the answer, which need not wait for it
            asyncio.get_running_loop().call_soon(self._sum_answered)

    def _sum_answered(self) -> None:
        answered, self._answered = self._answered, []
        sums = self._sums
        for protocol, execution, tokens, began, received, sent, read, send, operation in answered:
            rows = execution.batch if execution.batch <= LARGEST_BATCH else MORE
            key = protocol, execution.model, execution.version, rows, operation
            found = sums.get(key)
            if found is None:
                found = sums[key] = RunTotals()
            found.add(execution, tokens, began, received, sent, read, send)

    def _tell_answered(self) -> None:
        self._sum_answered()
        sums, self._sums = self._sums, {}
        for (protocol, model, version, rows, operation), found in sums.items():
            tally = self._tallies[model, version, rows]
            for name, amount in found.tally.items():
                tally[name] += amount
            self._asked[model, version] = max(self._asked.get((model, version), 0), _of_the_wall(found.last))
            self.tokens(model, found.tokens)
            self._count(self._instruments.requests(protocol, model, "ok"), found.count)
            latencies = self._latencies[protocol]
            for index, amount in enumerate(found.latencies):
                latencies[index] += amount
            latencies[-1] += found.seconds
            self.carried(protocol, found.received, found.sent, found.read, found.send)
            self.parsed(protocol, found.parse)
            if operation:
                self._count(self._instruments.operations(model, operation), found.count)

    def executed(self, execution: RunTimer, success: bool, end: float) -> None:
        """Count a request to a model that ended at `end`, of the clock of its marks."""
        rows: int | str = execution.batch if execution.batch <= LARGEST_BATCH else MORE
        self._soon()
        tally = self._tallies[execution.model, execution.version, rows if success else FAILED]
        tally[COUNT] += 1
        tally[TOTAL] += end - execution.marks[0]
        if success:
            tally[ROWS] += execution.rows
            begin, checked, queued, ran, passed = execution.marks
            tally[INPUT] += checked - begin
            tally[QUEUE] += queued - checked
            tally[INFER] += ran - queued
            tally[OUTPUT] += passed - ran
        self._asked[execution.model, execution.version] = _of_the_wall(end)

    def carried(self, protocol: str, received: int, sent: int, read: float = 0, send: float = 0) -> None:
        """Count bytes of bodies or messages of a protocol, and seconds in which they were read and sent, soon."""
        self._soon()
        sums = self._carried[protocol]
        sums[0] += received
        sums[1] += sent
        sums[2] += read
        sums[3] += send

    def parsed(self, protocol: str, seconds: float) -> None:
        """Count the seconds from the head of a request of a protocol until what it asks was checked, soon."""
        self._count(self._instruments.parsed(protocol), seconds)

    def provider(self, requested: str, active: str, probed: str | None) -> None:
        """Say where models run."""
        self._instruments.provider.labels(requested, active, probed or "none").set(1)

    def tokens(self, model: str, count: int) -> None:
        """Count tokens that were embedded."""
        self._count(self._instruments.tokens(model), count)

    def operation(self, model: str, operation: str) -> None:
        """Count a message of a stream; `operation` is one of a few names."""
        self._count(self._instruments.operations(model, operation), 1)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a decode stream while it is open."""
        self._instruments.streams.inc()
        try:
            yield
        finally:
            self._instruments.streams.dec()

    def sequences(self, more: int) -> None:
        """Count sequences that have begun, or, as a negative number, that have ended."""
        self._instruments.sequences.inc(more)

    def _count(self, counter: Counter, amount: float) -> None:
        """Add to a counter, soon: adding to a number takes a tenth of the time."""
        self._soon()
        self._counted[counter] += amount

    def _soon(self) -> None:
        """With several workers, tell soon what is counted now: whoever is asked reads what every worker has told."""
        if self._shared and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(TELL_SECONDS, self.tell)

    def tell(self) -> None:
        """Add what was counted since the last time to the counters."""
        self._telling = False
        self._tell_answered()
        for protocol, (*counts, seconds) in self._latencies.items():
            self._instruments.seconds(protocol).add(counts, seconds)
        self._latencies.clear()
        carried, self._carried = self._carried, defaultdict(lambda: [0, 0, 0.0, 0.0])
        for protocol, sums in carried.items():
            for counter, amount in zip(self._instruments.carried(protocol), sums, strict=True):
                counter.inc(amount)
        counted, self._counted = self._counted, defaultdict(float)
        for counter, amount in counted.items():
            counter.inc(amount)
        tallies, self._tallies = self._tallies, defaultdict(lambda: defaultdict(float))
        for (model, version, rows), tally in tallies.items():
            self._tell(model, version, rows, tally)
        asked, self._asked = self._asked, {}
        for key, when in asked.items():
            self._instruments.last(*key).set(when)

    def _tell(self, model: str, version: int, rows: int | str, tally: dict[str, float]) -> None:
        """Add what was counted of executions of so many rows, of those that joined another, or of those that failed."""
        found, outcome = self._instruments, "fail" if rows == FAILED else "success"
        _add(found.outcome(model, version, outcome), tally[COUNT], tally[TOTAL])
        if rows == FAILED:
            return
        found.rows(model, version).inc(tally[ROWS])
        for phase in PHASES:
            timed = found.stage(model, version, rows, phase) if rows else found.batched(model, version, phase)
            _add(timed, tally[COUNT], tally[phase])

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a Prometheus format, and its content type; OpenMetrics where `accept` names it.

        Raises:
            Unavailable: what the workers have told cannot be read now.

        """
        with self._reading():
            registry = self._all()
            if "application/openmetrics-text" in accept:
                return generate_openmetrics(registry), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
            return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"

    def statistics(self) -> defaultdict[tuple[str, int], InferenceStatistics]:
        """Return what happened to each model, by name and version.

        Raises:
            Unavailable: what the workers have told cannot be read now.

        """
        with self._reading():
            families = list(self._all().collect())
        return history(families)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read files of other processes, for which no descriptor may be left."""
        try:
            yield
        except OSError as error:
            got = f"files that cannot be read ({error.strerror})"
            raise Unavailable("metrics", got, "what can be read; try again later") from error

    def _all(self) -> CollectorRegistry:
        """Return the metrics of every worker."""
        self.tell()
        folder = os.environ.get(FOLDER)
        if folder is None:
            return self._registry
        _forget_dead(Path(folder))
        registry = CollectorRegistry()
        if self._more is not None:
            registry.register(self._more)
        multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return registry


def _of_the_wall(moment: float) -> float:
    """Return the seconds since 1970 of a moment of the clock of marks."""
    return time.time() - time.perf_counter() + moment


def _add(timed: tuple[Counter, Counter], count: float, seconds: float) -> None:
    times, whole = timed
    times.inc(count)
    whole.inc(seconds)
