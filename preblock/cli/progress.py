"""Progress of a command on standard error."""

import shutil
import sys
import time

import click

LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two lines about the same step, when the output is not a terminal."""


class ProgressLine:
    """Shows the current step on standard error.

    A terminal gets one line, rewritten at each step. Any other output gets a few lines, or none if `quiet`.
    """

    def __init__(self, name: str, quiet: bool = False) -> None:
        self._name = name
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._topic = ""
        self._said = 0.0

    def __call__(self, step: str) -> None:
        """Show `step`; the text before its first colon names the topic."""
        topic, now = step.partition(": ")[0], time.monotonic()
        if self._terminal:  # a wrapped line could not be cleared
            line = f"{self._name}: {step}"[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r\033[K{line}", nl=False, err=True)
        elif self._quiet:
            return
        elif topic != self._topic or now - self._said >= LINE_INTERVAL_SECONDS:
            click.echo(f"{self._name}: {topic if topic != self._topic else step}", err=True)
            self._said = now
        self._topic = topic

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._topic:
            click.echo("\r\033[K", nl=False, err=True)
