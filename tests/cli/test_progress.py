"""Progress of a command, on a terminal and in a pipe."""

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace

import pytest

from preblock.cli.progress import ProgressLine

SCRIPT = """
import time
from preblock.cli.progress import ProgressLine
with ProgressLine("m") as progress:
    for step in ("reading", "proving", "proving: 1 of 2 cases", "reading", "proving"):
        progress(step)
    time.sleep({seconds})
"""


def test_progress_rewrites_line_on_terminal_and_thins_in_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(terminal: bool) -> str:
        stream, clock = StringIO(), iter([100.0, 101.0, 109.0, 111.0, 112.0])
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            if not terminal:
                patch.setattr("preblock.cli.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
            with ProgressLine("m") as progress:
                for step in ("reading", "writing", "writing: 8 GB, 1 GB/s", "writing: 9 GB, 1 GB/s", "proving"):
                    progress(step)
        return stream.getvalue()

    assert shown(terminal=False).splitlines() == ["m: reading", "m: writing", "m: writing: 9 GB, 1 GB/s", "m: proving"]
    lines = shown(terminal=True).split("\r\033[K")
    assert lines[3:] == ["m: writing: 8 GB, 1 GB/s", "m: writing: 9 GB, 1 GB/s", "m: proving", ""]


def test_progress_in_pipe_writes_plain_lines_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(seconds=0)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "m: reading\nm: proving\n")


def test_progress_on_terminal_shows_seconds_of_silent_step() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", SCRIPT.format(seconds=2.5)], stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode().split("\r\x1b[K")
    os.close(ours)
    assert shown[-1] == ""
    assert re.fullmatch(r"m: proving \([1-9] s\)", shown[-2])  # more than 1 s on a busy machine
