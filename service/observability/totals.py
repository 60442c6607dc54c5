"""Sums of request records."""

from bisect import bisect_left

from preblock.service.observability.instruments import SECONDS
from preblock.service.observability.record import OK, RequestRecord

INPUT, QUEUE, INFER, OUTPUT = STAGES = ("compute_input", "queue", "compute_infer", "compute_output")
"""Stages of a model request, named as in Triton's statistics extension."""


class RecordTotals:
    """The sums of records that have the same protocol, model, batch, operation and outcome.

    Attributes:
        count: requests.
        seconds: from start to end.
        latencies: requests by bucket of `SECONDS`.
        runs: requests that asked a model.
        run_seconds: from asking the model to the end.
        rows, tokens: answered.
        decode_seconds: from start to the end of validation.
        stages: seconds by stage of `STAGES`.
        last: timestamp of the last end.

    """

    __slots__ = (
        *("count", "decode_seconds", "last", "latencies", "rows", "run_seconds", "runs", "seconds", "tokens"),
        *("_infer", "_input", "_output", "_queue"),
    )

    def __init__(self) -> None:
        self.count = self.runs = self.rows = self.tokens = 0
        self.seconds = self.run_seconds = self.decode_seconds = self.last = 0.0
        self._input = self._queue = self._infer = self._output = 0.0
        self.latencies = [0] * (len(SECONDS) + 1)

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        seconds, end = record.seconds, record.ended
        self.count += 1
        self.seconds += seconds
        self.latencies[bisect_left(SECONDS, seconds)] += 1
        if not record.asked:
            return
        self.runs += 1
        self.run_seconds += end - record.asked
        self.last = max(self.last, end)
        if record.outcome == OK:
            self.rows += record.rows
            self.tokens += record.tokens
            self.decode_seconds += record.checked - record.started
            self._input += record.checked - record.asked
            self._queue += record.dequeued - record.checked
            self._infer += record.ran - record.dequeued
            self._output += end - record.ran

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage."""
        return {INPUT: self._input, QUEUE: self._queue, INFER: self._infer, OUTPUT: self._output}
