"""Counters and histograms, in base units and with bounded labels, readable over several workers.

With several workers each keeps its numbers in files of the folder PROMETHEUS_MULTIPROC_DIR, and whoever is asked
sums over all of them.
"""

import asyncio
import os
import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from incipit.service.errors import ClientFault, IncipitError, Unavailable
from incipit.service.visit import CURRENT, current_trace

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
QUEUE, INPUT, INFER, OUTPUT = "queue", "compute_input", "compute_infer", "compute_output"
PHASES = (INPUT, QUEUE, INFER, OUTPUT)
"""The phases of an execution: what is asked for is checked, waits for a thread, runs, and is made what was wanted."""
TELL_SECONDS = 0.1
"""With several workers, how late a count may be seen by another."""
MOST_ANSWERED = 16
"""Requests that are kept before they are counted: one by one takes twice as long, and more would hold others up."""
LARGEST_BATCH = 64
"""Executions of more rows are counted together, so that nobody can add numbers without end."""
MORE, FAILED = "more", "failed"
"""In the place of a number of rows: more than that, and those of executions that failed."""
RESERVED = {"counter": 2**20, "histogram": 2**18, "gauge_livesum": 2**16, "gauge_max": 2**16}
"""Bytes of the files of a worker, by their kind: enough for ten versions of models with batches of all sizes."""
COUNT, TOTAL, ROWS = "count", "seconds", "rows"
"""Of executions, beside the phases."""


class Observation:
    """One request of a door, or a step of a stream, while the block runs; an error that leaves it is its outcome.

    `model` is what the door learns while it answers; `outcome` and `seconds` are there after it.
    """

    __slots__ = ("_begin", "_metrics", "door", "model", "outcome", "seconds")

    def __init__(self, metrics: "Metrics", door: str) -> None:
        self._metrics, self.door, self.model = metrics, door, ""

    def __enter__(self) -> "Observation":
        """Begin."""
        self._begin = time.perf_counter()
        if (visit := CURRENT.get()) is not None:
            visit.door = self.door.removesuffix("-open")  # what follows is of the door that was opened
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Count the request."""
        self.outcome = "ok" if kind is None else _outcome(kind)
        self.seconds = time.perf_counter() - self._begin
        self._metrics.asked(self.door, self.model, self.outcome, self.seconds)
        if (trace := current_trace()) is not None:
            if self.model:
                trace.attributes["incipit.model"] = self.model
            if kind is not None:
                trace.refused(self.outcome, issubclass(kind, Exception) and not issubclass(kind, ClientFault))


def _outcome(kind: type[BaseException]) -> str:
    if issubclass(kind, IncipitError):
        return kind.__name__
    return "Failed" if issubclass(kind, Exception) else "Aborted"


class Execution:
    """One request to a model while the block runs, and the phases of it as they pass.

    `rows` are those of the request. `batch` counts the rows of the run of the model, those of other requests included;
    it is 0 in a request that joined the run of another. Where `goes_on` was set, the execution does not end with the
    block, but by `end`.
    """

    __slots__ = ("_metrics", "batch", "goes_on", "marks", "model", "rows", "version")

    def __init__(self, metrics: "Metrics", model: str, version: int) -> None:
        self._metrics, self.model, self.version = metrics, model, version
        self.rows = self.batch = 0
        self.goes_on = False
        self.marks = [time.perf_counter()]

    def __enter__(self) -> "Execution":
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
        self._metrics.executed(self, success, time.perf_counter())


class _Latencies(Histogram):
    """A histogram that takes many observations at once: one by one they take several times as long."""

    def add(self, counts: Sequence[float], seconds: float) -> None:
        """Add so many observations to each bucket, that of the largest included, which took so many seconds in all."""
        self._sum.inc(seconds)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


@dataclass
class Duration:
    """How often something happened, and how many seconds it took in all."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class Statistics:
    """What happened to one version of a model since the service started.

    Args:
        last: when it was last asked, in seconds since 1970; 0 for never.
        rows: answered.
        outcomes: "success" and "fail".
        phases: by the rows of the execution, None for more than `LARGEST_BATCH`, and the phase.
        joined: by phase, of the requests that were answered by the execution of another.

    """

    last: float = 0.0
    rows: int = 0
    outcomes: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))
    phases: defaultdict[tuple[int | None, str], Duration] = field(default_factory=lambda: defaultdict(Duration))
    joined: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))


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
        requests = Counter(
            "incipit_requests",
            "Requests answered, by door, model and outcome: 'ok', the kind of error, 'Failed' or 'Aborted'.",
            ["door", "model", "outcome"],
            registry=self._registry,
        )
        seconds = _Latencies(
            "incipit_request_seconds",
            "Time from the head of a request, or a step of a stream, to its answer, in seconds.",
            ["door"],
            buckets=SECONDS,
            registry=self._registry,
        )
        tokens = Counter("incipit_tokens", "Tokens embedded.", ["model"], registry=self._registry)
        operations = Counter(
            "incipit_stream_operations",
            "Messages of decode streams answered without an error, by model and operation.",
            ["model", "operation"],
            registry=self._registry,
        )
        self._streams = Gauge(
            "incipit_streams_open",
            "Streams open now, of every door.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._sequences = Gauge(
            "incipit_sequences_open",
            "Sequences of the Open Inference Protocol that run now.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._outcome = self._timed(
            "request",
            "Requests to a model, whichever door they came through, by outcome: 'success' or 'fail'.",
            ["model", "version", "outcome"],
        )
        self._phase = self._timed(
            "phase",
            f"Phases of executions, by the rows of all requests: 1 to {LARGEST_BATCH}, or 'more'.",
            ["model", "version", "rows", "phase"],
        )
        self._joined = self._timed(
            "joined_phase",
            "Phases of requests that were answered by the execution of another.",
            ["model", "version", "phase"],
        )
        rows = Counter("incipit_model_rows", "Rows answered.", ["model", "version"], registry=self._registry)
        last = Gauge(
            "incipit_model_last_request_timestamp_seconds",
            "When a model was last asked, in seconds since 1970.",
            ["model", "version"],
            registry=self._registry,
            multiprocess_mode="max",
        )
        received = Counter("incipit_received_bytes", "Bytes of bodies and messages.", ["door"], registry=self._registry)
        sent = Counter("incipit_sent_bytes", "Bytes of answers, without heads.", ["door"], registry=self._registry)
        read = Counter(
            "incipit_request_read_seconds",
            "Time from the heads of requests until their bodies were there, in seconds.",
            ["door"],
            registry=self._registry,
        )
        send = Counter(
            "incipit_request_send_seconds",
            "Time in which answers were handed to their connections, in seconds; that to compute large ones included.",
            ["door"],
            registry=self._registry,
        )
        self._provider = Gauge(
            "incipit_provider_info",
            "Where models run, as onnxruntime names it: what was requested, is active, and ran when CUDA was tried.",
            ["requested", "active", "probed"],
            registry=self._registry,
            multiprocess_mode="max",
        )
        self._carried: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        self._carriers = cache(lambda door: [counter.labels(door) for counter in (received, sent, read, send)])
        # Looking labels up takes longer than counting; each has few values.
        self._requests, self._seconds = cache(requests.labels), cache(seconds.labels)
        self._tokens, self._operations = cache(tokens.labels), cache(operations.labels)
        self._rows, self._last = cache(rows.labels), cache(last.labels)
        self._counted: defaultdict[Counter, float] = defaultdict(float)
        self._answered: list[tuple[str, Execution, int, tuple[int, int, float, float], str]] = []
        self._latencies: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (len(SECONDS) + 2))
        self._tallies: defaultdict[tuple[str, int, int | str], defaultdict[str, float]]
        self._tallies = defaultdict(lambda: defaultdict(float))
        self._asked: dict[tuple[str, int], float] = {}
        self._shared, self._telling = FOLDER in os.environ, False
        if self._shared:  # the first of a kind opens its file, for which there may be no descriptor later
            self._seconds("native")
            self._carriers("native")

    def _timed(self, noun: str, told: str, labels: list[str]) -> Callable[..., tuple[Counter, Counter]]:
        """Return what finds, by labels, the counters of how often something happened to a model, and how long it took.

        Not summaries, which cannot be told many observations at once.
        """
        times = Counter(f"incipit_model_{noun}s", told, labels, registry=self._registry)
        whole = "Time of what is counted beside it, in seconds."
        seconds = Counter(f"incipit_model_{noun}_seconds", whole, labels, registry=self._registry)
        return cache(lambda *values: (times.labels(*values), seconds.labels(*values)))

    def request(self, door: str) -> Observation:
        """Return what counts and times one request of `door`."""
        return Observation(self, door)

    def execution(self, model: str, version: int) -> Execution:
        """Return what counts and times one request to a model."""
        execution = Execution(self, model, version)
        if (visit := CURRENT.get()) is not None:
            visit.marks = execution.marks
        return execution

    def asked(self, door: str, model: str, outcome: str, seconds: float) -> None:
        """Count a request that was answered, and how long that took."""
        self._count(self._requests(door, model, outcome), 1)
        latencies = self._latencies[door]
        latencies[bisect_left(SECONDS, seconds)] += 1
        latencies[-1] += seconds

    def answered(
        self,
        door: str,
        execution: Execution,
        tokens: int,
        received: int = 0,
        sent: int = 0,
        read: float = 0,
        send: float = 0,
        operation: str = "",
    ) -> None:
        """Count all of a request that is answered, which took from its first mark to its last, soon.

        What follows the tokens is as in `carried`; `operation` is that of a stream, if it is a message of one.
        """
        self._soon()
        self._answered.append((door, execution, tokens, (received, sent, read, send), operation))
        if len(self._answered) == MOST_ANSWERED:  # behind the answer, which need not wait for it
            asyncio.get_running_loop().call_soon(self._tell_answered)

    def _tell_answered(self) -> None:
        answered, self._answered = self._answered, []
        for door, execution, tokens, carried, operation in answered:
            begin, *_, end = execution.marks
            self.executed(execution, True, end)
            self.tokens(execution.model, tokens)
            self.asked(door, execution.model, "ok", end - begin)
            self.carried(door, *carried)
            if operation:
                self.operation(execution.model, operation)

    def executed(self, execution: Execution, success: bool, end: float) -> None:
        """Count a request to a model that ended at `end`, of the clock of its marks."""
        rows: int | str = execution.batch if execution.batch <= LARGEST_BATCH else MORE
        self._soon()
        tally = self._tallies[execution.model, execution.version, rows if success else FAILED]
        tally[COUNT] += 1
        tally[TOTAL] += end - execution.marks[0]
        if success:
            tally[ROWS] += execution.rows
            for phase, (begin, passed) in zip(PHASES, pairwise(execution.marks), strict=True):
                tally[phase] += passed - begin
        self._asked[execution.model, execution.version] = time.time()

    def carried(self, door: str, received: int, sent: int, read: float = 0, send: float = 0) -> None:
        """Count bytes of bodies or messages of a door, and seconds in which they were read and sent, soon."""
        self._soon()
        sums = self._carried[door]
        sums[0] += received
        sums[1] += sent
        sums[2] += read
        sums[3] += send

    def provider(self, requested: str, active: str, probed: str | None) -> None:
        """Say where models run."""
        self._provider.labels(requested, active, probed or "none").set(1)

    def tokens(self, model: str, count: int) -> None:
        """Count tokens that were embedded."""
        self._count(self._tokens(model), count)

    def operation(self, model: str, operation: str) -> None:
        """Count a message of a stream; `operation` is one of a few names."""
        self._count(self._operations(model, operation), 1)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a decode stream while it is open."""
        self._streams.inc()
        try:
            yield
        finally:
            self._streams.dec()

    def sequences(self, more: int) -> None:
        """Count sequences that have begun, or, as a negative number, that have ended."""
        self._sequences.inc(more)

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
        for door, (*counts, seconds) in self._latencies.items():
            self._seconds(door).add(counts, seconds)
        self._latencies.clear()
        carried, self._carried = self._carried, defaultdict(lambda: [0, 0, 0.0, 0.0])
        for door, sums in carried.items():
            for counter, amount in zip(self._carriers(door), sums, strict=True):
                counter.inc(amount)
        counted, self._counted = self._counted, defaultdict(float)
        for counter, amount in counted.items():
            counter.inc(amount)
        tallies, self._tallies = self._tallies, defaultdict(lambda: defaultdict(float))
        for (model, version, rows), tally in tallies.items():
            self._tell(model, version, rows, tally)
        asked, self._asked = self._asked, {}
        for key, when in asked.items():
            self._last(*key).set(when)

    def _tell(self, model: str, version: int, rows: int | str, tally: dict[str, float]) -> None:
        """Add what was counted of executions of so many rows, of those that joined another, or of those that failed."""
        outcome = "fail" if rows == FAILED else "success"
        _add(self._outcome(model, version, outcome), tally[COUNT], tally[TOTAL])
        if rows == FAILED:
            return
        self._rows(model, version).inc(tally[ROWS])
        for phase in PHASES:
            timed = self._phase(model, version, rows, phase) if rows else self._joined(model, version, phase)
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

    def statistics(self) -> defaultdict[tuple[str, int], Statistics]:
        """Return what happened to each model, by name and version.

        Raises:
            Unavailable: what the workers have told cannot be read now.

        """
        found: defaultdict[tuple[str, int], Statistics] = defaultdict(Statistics)
        with self._reading():
            families = list(self._all().collect())
        for sample in (sample for family in families for sample in family.samples):
            if not sample.name.startswith("incipit_model_"):
                continue
            labels = sample.labels
            model = found[labels["model"], int(labels["version"])]
            match sample.name.removeprefix("incipit_model_"):
                case "requests_total":
                    model.outcomes[labels["outcome"]].count = int(sample.value)
                case "request_seconds_total":
                    model.outcomes[labels["outcome"]].seconds = sample.value
                case "phases_total":
                    model.phases[_rows(labels), labels["phase"]].count = int(sample.value)
                case "phase_seconds_total":
                    model.phases[_rows(labels), labels["phase"]].seconds = sample.value
                case "joined_phases_total":
                    model.joined[labels["phase"]].count = int(sample.value)
                case "joined_phase_seconds_total":
                    model.joined[labels["phase"]].seconds = sample.value
                case "rows_total":
                    model.rows = int(sample.value)
                case "last_request_timestamp_seconds":
                    model.last = sample.value
        return found

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


def _add(timed: tuple[Counter, Counter], count: float, seconds: float) -> None:
    times, whole = timed
    times.inc(count)
    whole.inc(seconds)


def _rows(labels: dict[str, str]) -> int | None:
    return None if labels["rows"] == MORE else int(labels["rows"])


def reserve(folder: Path) -> None:
    """Take the room that this worker's numbers need: on a full disk, a write into a file that is mapped ends a process.

    Raises:
        OSError: there is not as much.

    """
    for kind, size in RESERVED.items():
        draft = folder / f"{os.getpid()}.tmp"  # whoever reads the others takes no empty file for one of them
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            draft.replace(folder / f"{kind}_{os.getpid()}.db")
        finally:
            draft.unlink(missing_ok=True)


def _forget_dead(folder: Path) -> None:
    """Drop the gauges of workers that died: their streams are gone. Their counters stay."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(re.findall(r"\d+", file.name)[-1])
        if not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
