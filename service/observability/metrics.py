"""The metrics of a process: records are summed here, flushed to Prometheus counters, and exposed for all workers.

With several workers each writes its counters to files in the folder PROMETHEUS_MULTIPROC_DIR. The worker that answers a
scrape sums the files of all workers.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from preblock.service.core.errors import Unavailable
from preblock.service.observability.instruments import LARGEST_BATCH, MORE, Instruments
from preblock.service.observability.metric_files import FOLDER, _forget_dead
from preblock.service.observability.record import OK, RequestRecord
from preblock.service.observability.statistics import InferenceStatistics, history
from preblock.service.observability.totals import RecordTotals

FLUSH_SECONDS = 0.1
"""Delay after which the other workers see a count."""
MAX_RECORDS = 16
"""Records that are kept before they are summed: one by one takes twice as long, and more would hold others up."""


class Metrics:
    """The metrics of this process.

    Args:
        more: a collector that is asked whenever the metrics are read; default: none.

    """

    def __init__(self, more: Collector | None = None) -> None:
        self._registry = CollectorRegistry()
        self._more = more
        if more is not None:
            self._registry.register(more)
        self._instruments = Instruments(self._registry)
        self._records: list[RequestRecord] = []
        self._totals: defaultdict[tuple[str, str, int, int | str, str, str], RecordTotals] = defaultdict(RecordTotals)
        self._bytes: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        self._shared, self._flushing = FOLDER in os.environ, False
        if self._shared:  # the first of a kind opens its file, for which there may be no descriptor later
            self._instruments.seconds("native")
            self._instruments.bytes("native")

    def record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._flush_soon()
        self._records.append(record)
        if len(self._records) >= MAX_RECORDS:
            self._sum_records()

    def _sum_records(self) -> None:
        records, self._records = self._records, []
        for record in records:
            batch = record.batch if record.batch <= LARGEST_BATCH else MORE
            key = record.protocol, record.model, record.version, batch, record.operation, record.outcome
            self._totals[key].add(record)

    def count_bytes(self, protocol: str, received: int, sent: int, read: float = 0, send: float = 0) -> None:
        """Count bytes of bodies or messages of a protocol, and the seconds that it took to read and to send them."""
        self._flush_soon()
        sums = self._bytes[protocol]
        sums[0] += received
        sums[1] += sent
        sums[2] += read
        sums[3] += send

    def provider(self, requested: str, active: str, probed: str | None) -> None:
        """Say where models run."""
        self._instruments.provider.labels(requested, active, probed or "none").set(1)

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

    def _flush_soon(self) -> None:
        """With several workers, flush soon: a scrape reads the files that every worker has written."""
        if self._shared and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Add everything that was recorded since the last flush to the counters."""
        self._flushing = False
        self._sum_records()
        totals, self._totals = self._totals, defaultdict(RecordTotals)
        last: defaultdict[tuple[str, int], float] = defaultdict(float)
        for key, sums in totals.items():
            self._add(*key, sums)
            if sums.runs:
                last[key[1:3]] = max(last[key[1:3]], sums.last)
        for model, moment in last.items():
            self._instruments.last(*model).set(time.time() - time.perf_counter() + moment)
        carried, self._bytes = self._bytes, defaultdict(lambda: [0, 0, 0.0, 0.0])
        for protocol, amounts in carried.items():
            for counter, amount in zip(self._instruments.bytes(protocol), amounts, strict=True):
                counter.inc(amount)

    def _add(
        self,
        protocol: str,
        model: str,
        version: int,
        batch: int | str,
        operation: str,
        outcome: str,
        sums: RecordTotals,
    ) -> None:
        """Add the sums of some records to the counters."""
        found, runs = self._instruments, sums.runs
        found.requests(protocol, model, outcome).inc(sums.count)
        found.seconds(protocol).add(sums.latencies, sums.seconds)
        if operation and outcome == OK:
            found.operations(model, operation).inc(sums.count)
        if not runs:
            return
        _time(found.outcome(model, version, "success" if outcome == OK else "fail"), runs, sums.run_seconds)
        if outcome == OK:
            found.tokens(model).inc(sums.tokens)
            found.rows(model, version).inc(sums.rows)
            found.decoding(protocol).inc(sums.decode_seconds)
            for stage, seconds in sums.stages.items():
                timed = found.stage(model, version, batch, stage) if batch else found.batched(model, version, stage)
                _time(timed, runs, seconds)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a Prometheus format, and its content type; OpenMetrics where `accept` names it.

        Raises:
            Unavailable: the files of the workers cannot be read now.

        """
        with self._reading():
            registry = self._all()
            if "application/openmetrics-text" in accept:
                return generate_openmetrics(registry), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
            return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"

    def statistics(self) -> defaultdict[tuple[str, int], InferenceStatistics]:
        """Return what happened to each model, by name and version.

        Raises:
            Unavailable: the files of the workers cannot be read now.

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
        self.flush()
        folder = os.environ.get(FOLDER)
        if folder is None:
            return self._registry
        _forget_dead(Path(folder))
        registry = CollectorRegistry()
        if self._more is not None:
            registry.register(self._more)
        multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return registry


def _time(timed: tuple[Counter, Counter], count: float, seconds: float) -> None:
    """Add to a counter of events and to the counter of their seconds."""
    events, whole = timed
    events.inc(count)
    whole.inc(seconds)
