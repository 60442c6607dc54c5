"""What requests that were answered add up to."""

from bisect import bisect_left

from preblock.service.observability.instruments import SECONDS
from preblock.service.observability.timing import INFER, INPUT, OUTPUT, QUEUE, RunTimer

COUNT, TOTAL, ROWS = "count", "seconds", "rows"
"""Of executions, beside the phases."""


class RunTotals:
    """Requests that were answered by one execution each, of the same protocol, model and number of rows.

    Attributes:
        count: how many.
        rows, tokens: of them.
        received, sent: bytes of theirs, and of the answers.
        read, parse, send: seconds until their bodies were there, from then until they were checked, and of sending.
        seconds: from their first mark to the last.
        latencies: how many of them took as long as the buckets of `SECONDS` hold.
        last: when the last was answered, of the clock of the marks.

    """

    __slots__ = (
        *("count", "last", "latencies", "parse", "read", "received", "rows", "seconds", "send", "sent", "tokens"),
        *("_infer", "_input", "_output", "_queue"),
    )

    def __init__(self) -> None:
        self.count = self.rows = self.tokens = self.received = self.sent = 0
        self.read = self.parse = self.send = self.seconds = self.last = 0.0
        self._input = self._queue = self._infer = self._output = 0.0
        self.latencies = [0] * (len(SECONDS) + 1)

    def add(
        self, execution: RunTimer, tokens: int, began: float, received: int, sent: int, read: float, send: float
    ) -> None:
        """Add a request, all of which was there when it `began`."""
        begin, checked, queued, ran, end = execution.marks
        self.count += 1
        self.rows += execution.rows
        self.tokens += tokens
        self.received += received
        self.sent += sent
        self.read += read
        self.send += send
        self.parse += checked - began
        self.seconds += end - begin
        self._input += checked - begin
        self._queue += queued - checked
        self._infer += ran - queued
        self._output += end - ran
        self.latencies[bisect_left(SECONDS, end - begin)] += 1
        self.last = end

    @property
    def tally(self) -> dict[str, float]:
        """What they add to the executions of their model, by `COUNT`, `TOTAL`, `ROWS` and the phases."""
        phases = {INPUT: self._input, QUEUE: self._queue, INFER: self._infer, OUTPUT: self._output}
        return {COUNT: self.count, TOTAL: self.seconds, ROWS: self.rows, **phases}
