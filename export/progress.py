"""How far a long step is, in bytes and bytes per second."""

import hashlib
import time
from collections.abc import Callable
from io import BufferedReader

Report = Callable[[str], None]
PART = 2**20
"""Bytes that are hashed at once."""
PATIENCE, PAUSE = 1.0, 0.1
"""Seconds after which a step says how far it is, and between two times that it does."""


class Progress:
    """Counts the bytes of one step, and reports them once the step has taken a second.

    Args:
        report: is told the step, and how far it is.
        step: what is done.
        total: bytes in all; 0 where that is not known.

    """

    def __init__(self, report: Report, step: str, total: int = 0) -> None:
        self._report, self._step, self._total = report, step, total
        self._begin = time.monotonic()
        self._said = self._begin + PATIENCE - PAUSE
        self._done = 0

    def add(self, count: int) -> None:
        """Count further bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= PAUSE:
            self._said = now
            self._report(f"{self._step}: {self._far(now)}")

    def cases(self, done: int, of: int, count: int) -> None:
        """Count the bytes of a case, and report how many cases are done."""
        self._done += count
        now = time.monotonic()
        far = f", {self._far(now)}" if now - self._begin >= PATIENCE else ""
        self._report(f"{self._step}: {done} of {of} cases{far}")

    def sha256(self, stream: BufferedReader) -> str:
        """Return the SHA-256 of what `stream` holds, in hexadecimal, counting its bytes."""
        digest, part = hashlib.sha256(), bytearray(PART)
        while count := stream.readinto(part):
            digest.update(memoryview(part)[:count])
            self.add(count)
        return digest.hexdigest()

    def _far(self, now: float) -> str:
        of = f" of {in_bytes(self._total)}" if self._total else ""
        return f"{in_bytes(self._done)}{of}, {in_bytes(self._done / (now - self._begin))}/s"


def in_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 999.5 else f"{count:.0f} GB"
