"""The counters of one measurement, and its result."""

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass
class LoadCounters:
    """The counters of all connections.

    Args:
        begin: start, on the clock of `time.perf_counter`.
        end: time of the last answer.
        latencies: seconds of each successful request.
        received: bytes of the successful answers, over HTTP with their headers.
        errors: number of failed requests, by kind.
        messages: first message of each kind.

    """

    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    received: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def answered(self, sent: float, received: int) -> None:
        """Count an answer of `received` bytes to a request sent at the time `sent`."""
        self.end = time.perf_counter()
        self.latencies.append(self.end - sent)
        self.received += received

    def failed(self, kind: str, message: str) -> None:
        """Count a failed request."""
        self.errors[kind] += 1
        self.messages.setdefault(kind, message)


@dataclass(frozen=True)
class LoadResult:
    """The result of one measurement.

    Args:
        protocol: format of the requests.
        shape: rows, and tokens per row.
        connections: number of concurrent connections.
        seconds: time from the first request to the last answer.
        requests: number of successful requests.
        rates: requests, tokens and bytes per second.
        milliseconds: latency at `QUANTILES`; empty without a successful request.
        errors: number of failed requests, by kind.
        messages: first message of each kind.

    """

    protocol: str
    shape: tuple[int, int]
    connections: int
    seconds: float
    requests: int
    rates: dict[str, float]
    milliseconds: dict[str, float]
    errors: dict[str, int]
    messages: dict[str, str]

    @classmethod
    def of(cls, counters: LoadCounters, protocol: str, shape: tuple[int, int], connections: int) -> "LoadResult":
        """Return the result of the counters."""
        requests, seconds = len(counters.latencies), max(counters.end - counters.begin, 1e-9)
        cuts = np.percentile(counters.latencies, list(QUANTILES.values())) if requests else ()
        return cls(
            protocol=protocol,
            shape=shape,
            connections=connections,
            seconds=seconds if requests else 0.0,
            requests=requests,
            rates={
                "requests": requests / seconds,
                "tokens": requests * shape[0] * shape[1] / seconds,
                "bytes": counters.received / seconds if requests else 0.0,
            },
            milliseconds={name: 1e3 * float(cut) for name, cut in zip(QUANTILES, cuts, strict=False)},
            errors=dict(counters.errors),
            messages=counters.messages,
        )
