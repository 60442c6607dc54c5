"""What is counted, by the names and labels that Prometheus knows it by: base units, and labels of few values."""

from collections.abc import Callable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LARGEST_BATCH = 64
"""Executions of more rows are counted together, so that nobody can add numbers without end."""
MORE = "more"
"""In the place of a number of rows: more than that."""


class BatchHistogram(Histogram):
    """A histogram that takes many observations at once: one by one they take several times as long."""

    def add(self, counts: Sequence[float], seconds: float) -> None:
        """Add so many observations to each bucket, that of the largest included, which took so many seconds in all."""
        self._sum.inc(seconds)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class Instruments:
    """The counters, gauges and histograms of this process; those with labels are found by them.

    Args:
        registry: that shows them.

    """

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "preblock_requests",
            "Requests by protocol, model and outcome: 'ok', the kind of error, 'internal_error' or 'cancelled'.",
            ["protocol", "model", "outcome"],
            registry=registry,
        )
        seconds = BatchHistogram(
            "preblock_request_duration_seconds",
            "Time from the head of a request, or a step of a stream, to its answer, in seconds.",
            ["protocol"],
            buckets=SECONDS,
            registry=registry,
        )
        tokens = Counter("preblock_tokens", "Tokens embedded.", ["model"], registry=registry)
        operations = Counter(
            "preblock_stream_operations",
            "Messages of decode streams answered without an error, by model and operation.",
            ["model", "operation"],
            registry=registry,
        )
        self.streams = Gauge(
            "preblock_streams_open",
            "Streams open now, of every protocol.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.sequences = Gauge(
            "preblock_sequences_open",
            "Sequences of the Open Inference Protocol that run now.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.outcome = _timed(
            registry,
            "request",
            "Requests to a model, whichever protocol they came through, by outcome: 'success' or 'fail'.",
            ["model", "version", "outcome"],
        )
        self.stage = _timed(
            registry,
            "stage",
            f"Phases of executions, by the rows of all requests: 1 to {LARGEST_BATCH}, or 'more'.",
            ["model", "version", "rows", "stage"],
        )
        self.batched = _timed(
            registry,
            "batched_stage",
            "Phases of requests that were answered by the execution of another.",
            ["model", "version", "stage"],
        )
        rows = Counter("preblock_model_rows", "Rows answered.", ["model", "version"], registry=registry)
        last = Gauge(
            "preblock_model_last_request_timestamp_seconds",
            "When a model was last asked, in seconds since 1970.",
            ["model", "version"],
            registry=registry,
            multiprocess_mode="max",
        )
        received = Counter("preblock_request_bytes", "Bytes of bodies and messages.", ["protocol"], registry=registry)
        sent = Counter("preblock_response_bytes", "Bytes of answers, without heads.", ["protocol"], registry=registry)
        read = Counter(
            "preblock_request_body_read_seconds",
            "Time from the heads of requests until their bodies were there, in seconds.",
            ["protocol"],
            registry=registry,
        )
        parse = Counter(
            "preblock_request_decode_seconds",
            "Time from when requests, or steps, were there until they were checked, of those answered, in seconds.",
            ["protocol"],
            registry=registry,
        )
        send = Counter(
            "preblock_request_response_write_seconds",
            "Time in which answers were handed to their connections, in seconds; that to compute large ones included.",
            ["protocol"],
            registry=registry,
        )
        self.provider = Gauge(
            "preblock_provider_info",
            "Where models run, as onnxruntime names it: what was requested, is active, and ran when CUDA was tried.",
            ["requested", "active", "probed"],
            registry=registry,
            multiprocess_mode="max",
        )
        # Looking labels up takes longer than counting; each has few values.
        self.requests, self.seconds = cache(requests.labels), cache(seconds.labels)
        self.tokens, self.operations = cache(tokens.labels), cache(operations.labels)
        self.decoding = cache(parse.labels)
        self.rows, self.last = cache(rows.labels), cache(last.labels)
        self.bytes = cache(lambda protocol: [counter.labels(protocol) for counter in (received, sent, read, send)])


def _timed(
    registry: CollectorRegistry, noun: str, told: str, labels: list[str]
) -> Callable[..., tuple[Counter, Counter]]:
    """Return what finds, by labels, the counters of how often something happened to a model, and how long it took.

    Not summaries, which cannot be told many observations at once.
    """
    times = Counter(f"preblock_model_{noun}s", told, labels, registry=registry)
    whole = "Time of what is counted beside it, in seconds."
    seconds = Counter(f"preblock_model_{noun}_seconds", whole, labels, registry=registry)
    return cache(lambda *values: (times.labels(*values), seconds.labels(*values)))
