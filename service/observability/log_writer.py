"""A logging handler without blocking writes: a thread writes the lines, and excess lines are dropped and counted."""

import logging
import os
import select
import time
from collections import deque
from threading import Condition, Thread

MAX_WAITING_BYTES = 2**20
"""Size of the queue of the thread; a pipe without a reader takes 64 KiB more."""
CLOSE_TIMEOUT_SECONDS = 1.0
"""Time to write the last lines at the end of the process."""
STANDARD_ERROR = 2


class DroppedLines:
    """Number of dropped lines of this process, for the metrics."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int) -> None:
        """Count dropped lines."""
        self._count += count

    def take(self) -> int:
        """Return the number since the last call."""
        count, self._count = self._count, 0
        return count


DROPPED_LINES = DroppedLines()


class LogWriter(logging.Handler):
    """Writes lines to standard error from a thread: a full pipe stops only the thread.

    Args:
        descriptor: file descriptor to write to; default: standard error.

    """

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._waiting = self._dropped = 0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line for the thread, or drop it if too many lines wait."""
        line = self._encode(record)
        with self._changed:
            if self._waiting + len(line) > MAX_WAITING_BYTES:
                self._drop(1)
                return
            self._lines.append(line)
            self._waiting += len(line)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _encode(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # a library's arguments do not fit its message
            text = f"{record.levelname} {record.name}: {record.msg!r} (not formatted: {error})"
        return f"{text}\n".encode(errors="backslashreplace")

    def _drop(self, count: int) -> None:
        self._dropped += count
        DROPPED_LINES.add(count)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                lines = [*self._lines]
                self._lines.clear()
            written = self._write(b"".join(lines))
            dropped = 0
            with self._changed:
                self._waiting -= sum(map(len, lines))
                if written:
                    dropped, self._dropped = self._dropped, 0
                else:
                    self._drop(len(lines))
                self._changed.notify_all()
            if dropped:
                text = "%d log lines were dropped, because standard error accepted no more"
                self.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (dropped,), None))

    def _write(self, content: bytes) -> bool:
        """Write lines, and return whether anybody can read them."""
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:
                return False
        return True

    def flush(self) -> None:
        """Wait until the lines are written, for at most CLOSE_TIMEOUT_SECONDS."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End the thread after the queued lines."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()
