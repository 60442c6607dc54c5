"""The metrics of a process: records are summed here, flushed to Prometheus counters, and exposed for all workers.

Each of several workers writes its counters to files in the folder PROMETHEUS_MULTIPROC_DIR. The worker with the scrape
request sums the files of all workers. The statistics of each model are read from the same counters.
"""

import asyncio
import os
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from preblock.service.core.errors import Unavailable
from preblock.service.observability.context import OK, PROTOCOLS, RequestRecord
from preblock.service.observability.instruments import BUCKETS_SECONDS, LARGER_BATCH, MAX_BATCH_LABEL, Instruments
from preblock.service.observability.logs import DROPPED_LINES
from preblock.service.observability.process_metrics import FOLDER, remove_dead_gauges

INPUT, QUEUE, INFER, OUTPUT = STAGES = ("compute_input", "queue", "compute_infer", "compute_output")
"""Stages of a model request, named as in Triton's statistics extension."""


@dataclass
class Duration:
    """A number of events, and the sum of their seconds."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class InferenceStatistics:
    """Statistics of one version of a model since the start of the service.

    Args:
        last: time of the last request, in seconds since 1970; 0 before the first.
        rows: embedded rows.
        outcomes: requests by outcome, "success" or "fail".
        stages: runs by rows of the batch and stage. Rows are None over `MAX_BATCH_LABEL`, and 0 for requests in the run
            of another request.

    """

    last: float = 0.0
    rows: int = 0
    outcomes: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))
    stages: defaultdict[tuple[int | None, str], Duration] = field(default_factory=lambda: defaultdict(Duration))


def read_statistics(families: Iterable[Metric]) -> defaultdict[tuple[str, int], InferenceStatistics]:
    """Return the statistics of each model, by name and version."""
    found: defaultdict[tuple[str, int], InferenceStatistics] = defaultdict(InferenceStatistics)
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.startswith("preblock_model_"):
            continue
        labels, name = sample.labels, sample.name.removeprefix("preblock_model_")
        model = found[labels["model"], int(labels["version"])]
        if name == "rows_total":
            model.rows = int(sample.value)
        elif name == "last_request_timestamp_seconds":
            model.last = sample.value
        elif "outcome" in labels or "stage" in labels:
            of_stage = "stage" in labels
            duration = model.stages[_rows(labels), labels["stage"]] if of_stage else model.outcomes[labels["outcome"]]
            if name.endswith("_seconds_total"):
                duration.seconds = sample.value
            else:
                duration.count = int(sample.value)
    return found


def _rows(labels: dict[str, str]) -> int | None:
    rows = labels.get("rows", "0")  # a stage without rows is one of a batched request
    return None if rows == LARGER_BATCH else int(rows)


class RecordTotals:
    """The sums of records with the same protocol, model, batch, operation and outcome.

    Attributes:
        count: requests.
        seconds: from start to end.
        latencies: requests by bucket of `BUCKETS_SECONDS`.
        runs: requests to a model.
        run_seconds: from the selection of the model to the end.
        rows, tokens: embedded.
        decode_seconds: from start to the end of validation.
        compute_input, queue, compute_infer, compute_output: seconds of these stages.
        last: timestamp of the last end.

    """

    __slots__ = (
        *("count", "decode_seconds", "last", "latencies", "rows", "run_seconds", "runs", "seconds", "tokens"),
        *STAGES,
    )

    def __init__(self) -> None:
        self.count = self.runs = self.rows = self.tokens = 0
        self.seconds = self.run_seconds = self.decode_seconds = self.last = 0.0
        self.compute_input = self.queue = self.compute_infer = self.compute_output = 0.0
        self.latencies = [0] * (len(BUCKETS_SECONDS) + 1)

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        seconds, end = record.seconds, record.ended
        self.count += 1
        self.seconds += seconds
        self.latencies[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        if not record.selected:
            return
        self.runs += 1
        self.run_seconds += end - record.selected
        self.last = max(self.last, end)
        if record.outcome == OK:
            self.rows += record.rows
            self.tokens += record.tokens
            # A stage that the request skipped has no timestamp, and took no time.
            checked = record.checked or record.selected
            dequeued = record.dequeued or checked
            ran = record.ran or dequeued
            self.decode_seconds += checked - record.started
            self.compute_input += checked - record.selected
            self.queue += dequeued - checked
            self.compute_infer += ran - dequeued
            self.compute_output += end - ran


FLUSH_INTERVAL_SECONDS = 0.1
"""Delay until other workers see a count."""
UNITS = "seconds", "bytes"
"""Units of metrics; others have none."""
MAX_RECORDS = 16
"""Records that are summed together. One by one takes twice as long; larger numbers would delay other requests."""


class Metrics:
    """The metrics of this process.

    Args:
        collectors: add their metrics to each scrape.

    Attributes:
        queue_depth: returns the number of work items waiting for a thread; the engine sets it.
        take_table_use: returns the rows and bytes gathered from n-gram tables since the last call, and the resident
            bytes of the tables; the application sets it.

    """

    def __init__(self, *collectors: Collector) -> None:
        self._registry = CollectorRegistry()
        self._collectors = collectors
        for collector in collectors:
            self._registry.register(collector)
        self._instruments = Instruments(self._registry)
        self.queue_depth: Callable[[], int] = int
        self.take_table_use: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        # With zeros, because a query finds no gauge before the first request otherwise.
        self._running = Counter(dict.fromkeys(PROTOCOLS, 0))
        self._records: list[RequestRecord] = []
        self._totals: defaultdict[tuple[str, str, int, int | str, str, str], RecordTotals] = defaultdict(RecordTotals)
        self._bytes: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        self._shared, self._flushing = FOLDER in os.environ, False
        if self._shared:  # the first counter of a kind opens a file; later no descriptor may be left
            self._instruments.seconds("native")
            self._instruments.bytes("native")

    @property
    def requests_running(self) -> int:
        """Number of requests and steps that this process has not yet answered."""
        return self._running.total()

    def load(self) -> dict[str, int]:
        """Return the load of this process by the names of `/readyz`."""
        return {"requests_running": self.requests_running, "queue_depth": self.queue_depth()}

    def start(self, record: RequestRecord) -> None:
        """Count a request as running until `record` is called."""
        if self._shared:
            self._flush_soon()
        record.running = True
        self._running[record.protocol] += 1

    def record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        if self._shared:
            self._flush_soon()
        if record.running:
            record.running = False
            self._running[record.protocol] -= 1
        self._records.append(record)
        if len(self._records) >= MAX_RECORDS:
            self._sum_records()

    def _sum_records(self) -> None:
        records, self._records = self._records, []
        for record in records:
            batch = record.batch if record.batch <= MAX_BATCH_LABEL else LARGER_BATCH
            key = record.protocol, record.model, record.version, batch, record.operation, record.outcome
            self._totals[key].add(record)

    def count_bytes(self, protocol: str, received: int, sent: int, read: float = 0, send: float = 0) -> None:
        """Count the bytes received and sent by a protocol, and the seconds spent reading and writing them."""
        if self._shared:
            self._flush_soon()
        sums = self._bytes[protocol]
        sums[0] += received
        sums[1] += sent
        sums[2] += read
        sums[3] += send

    def provider(self, requested: str, active: str, probed: str | None) -> None:
        """Set the execution providers of this process."""
        self._instruments.provider.labels(requested, active, probed or "none").set(1)

    def stream(self) -> AbstractContextManager[None]:
        """Count a stream while it is open."""
        return self._instruments.streams.track_inprogress()

    def sequences(self, change: int) -> None:
        """Change the number of open sequences."""
        self._instruments.sequences.inc(change)

    def _flush_soon(self) -> None:
        """Flush soon, since a scrape reads the files of every worker."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_later(FLUSH_INTERVAL_SECONDS, self.flush)

    def flush(self) -> None:
        """Add everything recorded since the last flush to the counters, and set the gauges of the load."""
        self._flushing = False
        self._sum_records()
        self._flush_totals()
        self._flush_bytes()
        self._set_gauges()
        if self._shared and self.requests_running:  # the queue changes while no request begins or ends
            self._flush_soon()

    def _flush_totals(self) -> None:
        totals, self._totals = self._totals, defaultdict(RecordTotals)
        clock = time.time() - time.perf_counter()
        instruments = self._instruments
        for key, sums in sorted(totals.items(), key=lambda item: item[1].last):  # the newest timestamp is set last
            protocol, model, version, batch, operation, outcome = key
            instruments.requests(protocol, model, outcome).inc(sums.count)
            instruments.seconds(protocol).add(sums.latencies, sums.seconds)
            if operation and outcome == OK:
                instruments.operations(model, operation).inc(sums.count)
            if not sums.runs:
                continue
            instruments.last(model, version).set(clock + sums.last)
            result = "success" if outcome == OK else "fail"
            instruments.outcome(sums.runs, sums.run_seconds, model, version, result)
            if outcome == OK:
                instruments.tokens(model).inc(sums.tokens)
                instruments.rows(model, version).inc(sums.rows)
                instruments.decoding(protocol).inc(sums.decode_seconds)
                for stage in STAGES:
                    if batch:
                        instruments.stage(sums.runs, getattr(sums, stage), model, version, batch, stage)
                    else:
                        instruments.batched(sums.runs, getattr(sums, stage), model, version, stage)

    def _flush_bytes(self) -> None:
        transferred, self._bytes = self._bytes, defaultdict(lambda: [0, 0, 0.0, 0.0])
        for protocol, amounts in transferred.items():
            for counter, amount in zip(self._instruments.bytes(protocol), amounts, strict=True):
                counter.inc(amount)

    def _set_gauges(self) -> None:
        """Set the gauges, and add what other modules have counted."""
        instruments = self._instruments
        instruments.dropped_lines.inc(DROPPED_LINES.take())
        for protocol, count in self._running.items():
            instruments.running(protocol).set(count)
        instruments.queue_depth.set(self.queue_depth())
        rows, gathered, resident = self.take_table_use()
        instruments.table_rows.inc(rows)
        instruments.table_row_bytes.inc(gathered)
        instruments.table_resident.set(resident)

    def expose(self, openmetrics: bool = False) -> tuple[bytes, str]:
        """Return all metrics in the text format of Prometheus or in OpenMetrics, and its content type.

        Raises:
            Unavailable: the files of the workers cannot be read now.

        """
        with self._collected() as registry:
            if openmetrics:
                return generate_openmetrics(_Units(registry)), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
            return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"

    def statistics(self) -> defaultdict[tuple[str, int], InferenceStatistics]:
        """Return the statistics of each model, by name and version.

        Raises:
            Unavailable: the files of the workers cannot be read now.

        """
        with self._collected() as registry:
            return read_statistics(registry.collect())

    @contextmanager
    def _collected(self) -> Iterator[CollectorRegistry]:
        """Yield the metrics of every worker."""
        folder = os.environ.get(FOLDER)
        registry = self._registry
        try:
            self.flush()
            if folder is not None:
                remove_dead_gauges(Path(folder))
                registry = CollectorRegistry()
                for collector in self._collectors:
                    registry.register(collector)
                multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
            yield registry
        except OSError as error:  # for example, no descriptor is left
            message = f"The metrics of the workers cannot be read now: {error.strerror}. Try again later."
            raise Unavailable("metrics", str(error.strerror), "readable files", message=message) from error


class _Units(Collector):
    """Adds to each metric the unit in its name, because the files of several workers hold no units."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the registry."""
        for metric in self._registry.collect():
            metric.unit = next((unit for unit in UNITS if metric.name.endswith(f"_{unit}")), "")
            yield metric
