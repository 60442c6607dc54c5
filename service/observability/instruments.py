"""The Prometheus metrics of the service, with their names, units and labels. Each label has few values."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram's buckets."""
MAX_BATCH_LABEL = 64
"""Larger batches share one label value, to bound the number of time series."""
LARGER_BATCH = "more"
"""Value of the label `rows` for a batch over `MAX_BATCH_LABEL`."""


class BatchHistogram(Histogram):
    """A histogram that takes many observations in one call. Separate calls take several times as long."""

    def add(self, counts: Sequence[float], seconds: float) -> None:
        """Add `counts[i]` observations to bucket i, the last one unbounded; `seconds` is the sum of all values."""
        self._sum.inc(seconds)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class _Maker:
    """Makes the metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        # Looking up labels takes longer than counting. Each label has few values, so the functions cache them.
        return cache(Counter(name, text, labels, registry=self.registry).labels)

    def gauge(self, name: str, text: str, mode: Literal["livesum", "max"], *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry, multiprocess_mode=mode)

    def timed(self, noun: str, text: str, *labels: str) -> Callable[..., None]:
        """Return a function to add (events, seconds, *labels). A summary cannot add several events at once."""
        events = self.counter(f"preblock_model_{noun}s", text, *labels)
        seconds = self.counter(f"preblock_model_{noun}_seconds", f"Seconds of preblock_model_{noun}s.", *labels)

        def add(count: float, duration: float, *values: object) -> None:
            events(*values).inc(count)
            seconds(*values).inc(duration)

        return add


class Instruments:
    """The counters, gauges and histograms of this process. Metrics with labels are functions of the labels.

    Args:
        registry: registry of the metrics.

    """

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        make = _Maker(registry)
        self._make_requests(make)
        self._make_models(make)
        self._make_transport(make)
        self._make_process(make)

    def _make_requests(self, make: _Maker) -> None:
        outcomes = "Requests by protocol, model and outcome: 'ok', the kind of error, 'internal_error' or 'cancelled'."
        self.requests = make.counter("preblock_requests", outcomes, "protocol", "model", "outcome")
        text = "Seconds from the headers of a request, or from a stream step, to its response."
        seconds = BatchHistogram(
            "preblock_request_duration_seconds", text, ["protocol"], buckets=BUCKETS_SECONDS, registry=make.registry
        )
        self.seconds = cache(seconds.labels)
        self.tokens = make.counter("preblock_tokens", "Embedded tokens.", "model")
        text = "Successful messages of decode streams, by model and operation."
        self.operations = make.counter("preblock_stream_operations", text, "model", "operation")
        running = make.gauge("preblock_requests_running", "Requests and steps not yet answered.", "livesum", "protocol")
        self.running = cache(running.labels)
        text = "Work items waiting for a thread."
        self.queue_depth = make.gauge("preblock_queue_depth", text, "livesum")
        text = "Open streams of all protocols."
        self.streams = make.gauge("preblock_streams_open", text, "livesum")
        text = "Open sequences of the Open Inference Protocol."
        self.sequences = make.gauge("preblock_sequences_open", text, "livesum")

    def _make_models(self, make: _Maker) -> None:
        text = "Requests to a model, over all protocols, by outcome: 'success' or 'fail'."
        self.outcome = make.timed("request", text, "model", "version", "outcome")
        text = f"Stages of model runs, by rows of the batch: 1 to {MAX_BATCH_LABEL}, or '{LARGER_BATCH}'."
        self.stage = make.timed("stage", text, "model", "version", "rows", "stage")
        text = "Requests in the run of another request, by stage."
        self.batched = make.timed("batched_stage", text, "model", "version", "stage")
        self.rows = make.counter("preblock_model_rows", "Embedded rows.", "model", "version")
        text = "Time of the last request to a model, in seconds since 1970."
        last = make.gauge("preblock_model_last_request_timestamp_seconds", text, "max", "model", "version")
        self.last = cache(last.labels)

    def _make_transport(self, make: _Maker) -> None:
        received = make.counter("preblock_request_bytes", "Bytes of request bodies and messages.", "protocol")
        sent = make.counter("preblock_response_bytes", "Bytes of responses, without headers.", "protocol")
        text = "Seconds from request headers to the end of the body."
        read = make.counter("preblock_request_body_read_seconds", text, "protocol")
        text = "Seconds from a complete request or step to the end of its validation, if it succeeds."
        self.decoding = make.counter("preblock_request_decode_seconds", text, "protocol")
        text = "Seconds spent writing responses, including the computation of streamed responses."
        written = make.counter("preblock_request_response_write_seconds", text, "protocol")
        self.bytes = cache(lambda protocol: [total(protocol) for total in (received, sent, read, written)])

    def _make_process(self, make: _Maker) -> None:
        text = "Rows gathered from n-gram tables."
        self.table_rows = Counter("preblock_table_rows", text, registry=make.registry)
        text = "Bytes of the rows gathered from n-gram tables, as stored."
        self.table_row_bytes = Counter("preblock_table_row_bytes", text, registry=make.registry)
        text = "Resident bytes of the mapped n-gram tables; pages that several workers share count for each."
        self.table_resident = make.gauge("preblock_table_resident_bytes", text, "livesum")
        text = "Lines of the log that were dropped, because standard error accepted no more."
        self.dropped_lines = Counter("preblock_log_dropped_lines", text, registry=make.registry)
        text = "Execution providers of onnxruntime: requested, active, and probed at the start."
        self.provider = make.gauge("preblock_provider_info", text, "max", "requested", "active", "probed")
