"""What the connections of one measurement saw, and what it comes to."""

import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass
class Tally:
    """Counts, from `begin` on.

    Args:
        begin: when it began, on the clock of `time.perf_counter`.
        end: when the last answer came.
        latencies: seconds of each request that was answered well.
        received: bytes that came, heads and frames included.
        errors: how many requests failed, by kind.
        messages: of each kind, what its first said.

    """

    begin: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    received: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def answered(self, sent: float) -> float:
        """Count an answer to what was sent then, and return the time."""
        self.end = time.perf_counter()
        self.latencies.append(self.end - sent)
        return self.end

    def failed(self, kind: str, message: str) -> None:
        """Count a request that failed."""
        self.errors[kind] += 1
        self.messages.setdefault(kind, message)


@dataclass(frozen=True)
class Result:
    """One measurement.

    Args:
        protocol: by which it was asked.
        shape: rows, and tokens of each.
        connections: that asked at a time.
        seconds: from the first request to the last answer.
        requests: that were answered well.
        rates: requests, tokens and bytes in a second.
        milliseconds: of a request, at `QUANTILES`; none where nothing was answered.
        errors: how many requests failed, by kind.
        messages: of each kind, what its first said.

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
    def of(cls, tally: Tally, protocol: str, shape: tuple[int, int], connections: int) -> "Result":
        """Sum up what was counted."""
        requests, seconds = len(tally.latencies), max(tally.end - tally.begin, 1e-9)
        cuts = np.percentile(tally.latencies, list(QUANTILES.values())) if requests else ()
        return cls(
            protocol=protocol,
            shape=shape,
            connections=connections,
            seconds=seconds if requests else 0.0,
            requests=requests,
            rates={
                "requests": requests / seconds,
                "tokens": requests * shape[0] * shape[1] / seconds,
                "bytes": tally.received / seconds if requests else 0.0,
            },
            milliseconds={name: 1e3 * float(cut) for name, cut in zip(QUANTILES, cuts, strict=False)},
            errors=dict(tally.errors),
            messages=tally.messages,
        )

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)
