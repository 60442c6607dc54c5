"""The progress of a long step, in bytes and bytes per second."""

import hashlib
import time
from collections.abc import Callable
from io import BufferedReader

Report = Callable[[str], None]
CHUNK_BYTES = 2**20
"""Bytes hashed at once."""
REPORT_AFTER_SECONDS = 1.0
REPORT_INTERVAL_SECONDS = 0.1
"""Seconds before the first report of a step, and between two reports."""


class StepProgress:
    """Counts the bytes of one step, and reports them once the step has taken a second.

    Args:
        report: receives the name and the progress of the step.
        step: name of the step.
        total: bytes in all; 0 if unknown.

    """

    def __init__(self, report: Report, step: str, total: int = 0) -> None:
        self._report, self._step, self._total = report, step, total
        self._begin = time.monotonic()
        self._last_report = self._begin + REPORT_AFTER_SECONDS - REPORT_INTERVAL_SECONDS
        self._done = 0

    def add(self, count: int) -> None:
        """Count further bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._last_report >= REPORT_INTERVAL_SECONDS:
            self._last_report = now
            self._report(f"{self._step}: {self._format_progress(now)}")

    def cases(self, done: int, of: int, count: int) -> None:
        """Count the bytes of a case, and report the number of finished cases."""
        self._done += count
        now = time.monotonic()
        progress = f", {self._format_progress(now)}" if now - self._begin >= REPORT_AFTER_SECONDS else ""
        self._report(f"{self._step}: {done} of {of} cases{progress}")

    def sha256(self, stream: BufferedReader) -> str:
        """Return the SHA-256 of `stream` in hexadecimal, and count its bytes."""
        digest, chunk = hashlib.sha256(), bytearray(CHUNK_BYTES)
        while count := stream.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
            self.add(count)
        return digest.hexdigest()

    def _format_progress(self, now: float) -> str:
        of = f" of {format_bytes(self._total)}" if self._total else ""
        return f"{format_bytes(self._done)}{of}, {format_bytes(self._done / (now - self._begin))}/s"


def format_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:.0f} GB"
