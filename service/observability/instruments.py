"""The Prometheus metrics of the service, with their names, units and labels. Each label has few values."""

from collections.abc import Callable, Sequence
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LARGEST_BATCH = 64
"""Larger batches share one label value, to bound the number of time series."""
MORE = "more"
"""Value of the label `rows` for a batch over `LARGEST_BATCH`."""


class BatchHistogram(Histogram):
    """A histogram to add many observations at once: one by one, they take several times as long."""

    def add(self, counts: Sequence[float], seconds: float) -> None:
        """Add `counts[i]` observations to bucket i, the last without a limit; `seconds` is the sum of all values."""
        self._sum.inc(seconds)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class Instruments:
    """The counters, gauges and histograms of this process. Metrics with labels are functions of the labels.

    Args:
        registry: registry of the metrics.

    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        requests = counter(
            "preblock_requests",
            "Requests by protocol, model and outcome: 'ok', the kind of error, 'internal_error' or 'cancelled'.",
            ["protocol", "model", "outcome"],
        )
        seconds = BatchHistogram(
            "preblock_request_duration_seconds",
            "Time from the head of a request, or a step of a stream, to its answer, in seconds.",
            ["protocol"],
            buckets=SECONDS,
            registry=registry,
        )
        tokens = counter("preblock_tokens", "Tokens embedded.", ["model"])
        operations = counter(
            "preblock_stream_operations",
            "Messages of decode streams answered without an error, by model and operation.",
            ["model", "operation"],
        )
        self.streams = gauge(
            "preblock_streams_open", "Streams open now, of every protocol.", multiprocess_mode="livesum"
        )
        self.sequences = gauge(
            "preblock_sequences_open",
            "Sequences of the Open Inference Protocol that run now.",
            multiprocess_mode="livesum",
        )
        self.outcome = _timed(
            counter,
            "request",
            "Requests to a model, whichever protocol they came through, by outcome: 'success' or 'fail'.",
            ["model", "version", "outcome"],
        )
        self.stage = _timed(
            counter,
            "stage",
            f"Phases of executions, by the rows of all requests: 1 to {LARGEST_BATCH}, or 'more'.",
            ["model", "version", "rows", "stage"],
        )
        self.batched = _timed(
            counter,
            "batched_stage",
            "Phases of requests that were answered by the execution of another.",
            ["model", "version", "stage"],
        )
        rows = counter("preblock_model_rows", "Rows answered.", ["model", "version"])
        last = gauge(
            "preblock_model_last_request_timestamp_seconds",
            "When a model was last asked, in seconds since 1970.",
            ["model", "version"],
            multiprocess_mode="max",
        )
        received = counter("preblock_request_bytes", "Bytes of bodies and messages.", ["protocol"])
        sent = counter("preblock_response_bytes", "Bytes of answers, without heads.", ["protocol"])
        read = counter(
            "preblock_request_body_read_seconds",
            "Time from the heads of requests until their bodies were there, in seconds.",
            ["protocol"],
        )
        parse = counter(
            "preblock_request_decode_seconds",
            "Time from when requests, or steps, were there until they were checked, of those answered, in seconds.",
            ["protocol"],
        )
        send = counter(
            "preblock_request_response_write_seconds",
            "Time in which answers were handed to their connections, in seconds; that to compute large ones included.",
            ["protocol"],
        )
        self.provider = gauge(
            "preblock_provider_info",
            "Where models run, as onnxruntime names it: what was requested, is active, and ran when CUDA was tried.",
            ["requested", "active", "probed"],
            multiprocess_mode="max",
        )
        # Looking labels up takes longer than counting; each has few values.
        self.requests, self.seconds = cache(requests.labels), cache(seconds.labels)
        self.tokens, self.operations = cache(tokens.labels), cache(operations.labels)
        self.decoding = cache(parse.labels)
        self.rows, self.last = cache(rows.labels), cache(last.labels)
        self.bytes = cache(lambda protocol: [counter.labels(protocol) for counter in (received, sent, read, send)])


def _timed(
    counter: Callable[..., Counter], noun: str, text: str, labels: list[str]
) -> Callable[..., tuple[Counter, Counter]]:
    """Return a function from labels to two counters: of events of a model, and of their seconds.

    A summary cannot add several observations at once.
    """
    times = counter(f"preblock_model_{noun}s", text, labels)
    seconds = counter(f"preblock_model_{noun}_seconds", "Time of what is counted beside it, in seconds.", labels)
    return cache(lambda *values: (times.labels(*values), seconds.labels(*values)))
