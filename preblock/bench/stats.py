"""The statistics of one measurement."""

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
FIELDS = ("protocol", "shape", "connections", "seconds", "requests", "rates", "milliseconds", "errors", "messages")


@dataclass
class LoadResult:
    """The result of one measurement, counted by all its connections.

    Args:
        protocol: format of the requests.
        shape: rows, and tokens per row.
        connections: number of concurrent connections.
        begin: start, on the clock of `time.perf_counter`.
        end: time of the last answer, and of the measurement at least.
        latencies: seconds of each successful request.
        received: bytes of the successful answers, over HTTP with their headers.
        errors: number of failed requests, by kind.
        messages: first message of each kind.

    """

    protocol: str
    shape: tuple[int, int]
    connections: int
    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    received: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def count_answer(self, sent: float, received: int) -> None:
        """Count an answer of `received` bytes to a request sent at the time `sent`."""
        self.end = time.perf_counter()
        self.latencies.append(self.end - sent)
        self.received += received

    def count_error(self, kind: str, message: str) -> None:
        """Count a failed request."""
        self.errors[kind] += 1
        self.messages.setdefault(kind, message)

    @property
    def requests(self) -> int:
        """Number of successful requests."""
        return len(self.latencies)

    @property
    def seconds(self) -> float:
        """Time from the first request to `end`; 0 without a successful request."""
        return self.end - self.begin if self.requests else 0.0

    @property
    def rates(self) -> dict[str, float]:
        """Requests, tokens and bytes per second; 0 without a successful request."""
        tokens = self.requests * self.shape[0] * self.shape[1]
        counts = {"requests": self.requests, "tokens": tokens, "bytes": self.received}
        return {name: count / max(self.seconds, 1e-9) for name, count in counts.items()}

    @property
    def milliseconds(self) -> dict[str, float]:
        """Latency at each of `QUANTILES`; empty without a successful request."""
        cuts = 1e3 * np.percentile(self.latencies, list(QUANTILES.values())) if self.requests else np.array([])
        return dict(zip(QUANTILES, cuts.tolist(), strict=False))

    def document(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {name: getattr(self, name) for name in FIELDS}
