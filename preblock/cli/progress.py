"""Progress of a command on standard error."""

import shutil
import sys
import time
from threading import Event, Lock, Thread

import click

LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two lines about the same step, when the output is not a terminal."""
TICK_SECONDS = 1.0
"""Seconds between two updates of the elapsed time on a terminal."""


class ProgressLine:
    """Shows the current step on standard error.

    A terminal gets one line, rewritten at each step; a silent step shows its seconds. Any other output gets each line
    once, without control characters, or none if `quiet`.
    """

    def __init__(self, name: str, quiet: bool = False) -> None:
        self._name = name
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._step = ""
        self._topic = ""
        self._reported = self._said = 0.0
        self._lines: set[str] = set()
        self._lock, self._end = Lock(), Event()
        self._ticker = Thread(target=self._tick, daemon=True)

    def __call__(self, step: str) -> None:
        """Show `step`; the text before its first colon names the topic."""
        topic, now = step.partition(": ")[0], time.monotonic()
        with self._lock:
            changed = topic != self._topic
            self._step, self._topic, self._reported = step, topic, now
            if self._terminal:
                self._rewrite(step)
            elif not self._quiet and (changed or now - self._said >= LINE_INTERVAL_SECONDS):
                self._write(topic if changed else step, now)

    def __enter__(self) -> "ProgressLine":
        if self._terminal:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._terminal:
            return
        self._end.set()
        self._ticker.join()
        if self._step:
            click.echo("\r\033[K", nl=False, err=True)

    def _write(self, text: str, now: float) -> None:
        line = f"{self._name}: {text}"
        if line not in self._lines:
            self._lines.add(line)
            self._said = now
            click.echo(line, err=True)

    def _rewrite(self, text: str) -> None:
        # A wrapped line could not be cleared.
        line = f"{self._name}: {text}"[: shutil.get_terminal_size().columns - 1]
        click.echo(f"\r\033[K{line}", nl=False, err=True)

    def _tick(self) -> None:
        while not self._end.wait(TICK_SECONDS):
            with self._lock:
                seconds = time.monotonic() - self._reported
                if self._step and seconds >= TICK_SECONDS:
                    self._rewrite(f"{self._step} ({seconds:.0f} s)")
