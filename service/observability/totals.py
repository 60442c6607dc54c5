"""Sums of request records."""

from bisect import bisect_left

from preblock.service.observability.context import OK, RequestRecord
from preblock.service.observability.instruments import BUCKETS_SECONDS

INPUT, QUEUE, INFER, OUTPUT = STAGES = ("compute_input", "queue", "compute_infer", "compute_output")
"""Stages of a model request, named as in Triton's statistics extension."""


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
