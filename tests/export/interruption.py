"""Commands and functions, interrupted in the middle."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support import commands


def end_at(number: signal.Signals, folder: Path, pattern: str, *arguments: str | Path) -> tuple[int, str]:
    """Send a signal to a command once `folder` holds a match of `pattern`; return its exit code and standard error.

    A match is a folder, or a file with some content.
    """
    with commands.running(commands.preblock, *arguments) as started:
        while not any(map(there, folder.glob(pattern))):
            assert started.process.is_alive(), started.wait()
            time.sleep(0.005)
        os.kill(started.process.pid or 0, number)
        done = started.wait()
        return done.returncode, done.stderr


def there(path: Path) -> bool:
    """Return True for a folder, and for a file with some content."""
    with suppress(FileNotFoundError):  # replaced in between
        return path.stat().st_size > 0
    return False


def interrupt_at(line: int, file: str, function: Callable[[], None]) -> bool:
    """Call a function, and interrupt it before one of its lines in `file`; return False if it ends before.

    `line` counts the executed lines from 0.
    """
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
