"""Counters and histograms, in base units and with bounded labels, readable over several workers.

With several workers each keeps its numbers in files of the folder PROMETHEUS_MULTIPROC_DIR, and whoever is asked
sums over all of them.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from incipit.service.errors import IncipitError

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class Observation:
    """What a door learns of a request while it answers it."""

    model: str = ""


class Metrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "incipit_requests",
            "Requests answered, by door, model and outcome: 'ok', the kind of error, 'Failed' or 'Aborted'.",
            ["door", "model", "outcome"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "incipit_request_seconds",
            "Time from the head of a request, or a step of a stream, to its answer, in seconds.",
            ["door"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter("incipit_tokens", "Tokens embedded.", ["model"], registry=self._registry)
        self._streams = Gauge(
            "incipit_streams_open",
            "Decode streams open now.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    @contextmanager
    def request(self, door: str) -> Iterator[Observation]:
        """Count and time one request of `door`; an error that leaves the block is its outcome."""
        observation, outcome, begin = Observation(), "ok", time.perf_counter()
        try:
            yield observation
        except IncipitError as error:
            outcome = type(error).__name__
            raise
        except Exception:
            outcome = "Failed"
            raise
        except BaseException:
            outcome = "Aborted"
            raise
        finally:
            self._seconds.labels(door).observe(time.perf_counter() - begin)
            self._requests.labels(door, observation.model, outcome).inc()

    def tokens(self, model: str, count: int) -> None:
        """Count tokens that were embedded."""
        self._tokens.labels(model).inc(count)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a decode stream while it is open."""
        self._streams.inc()
        try:
            yield
        finally:
            self._streams.dec()

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a Prometheus format, and its content type; OpenMetrics where `accept` names it."""
        registry = self._registry
        if folder := os.environ.get(FOLDER):
            _forget_dead(Path(folder))
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        if "application/openmetrics-text" in accept:
            return generate_openmetrics(registry), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


def _forget_dead(folder: Path) -> None:
    """Drop the gauges of workers that died: their streams are gone. Their counters stay."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(re.findall(r"\d+", file.name)[-1])
        if not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
