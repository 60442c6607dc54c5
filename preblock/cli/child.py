"""A part of a command in a child process, whose memory ends with it."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import click

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_in_child(function: Callable[[], None]) -> None:
    """Call `function` in a child process. If it fails, it writes its own message; exit with its code.

    A signal of `STOPS` ends the child, then this process. Ctrl-C reaches both processes, and the child ignores it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    numbers = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, _end_once)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.enable()
        function()
        sys.exit()
    received: list[int] = []

    def end_child(number: int, _: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    handlers = {number: signal.signal(number, end_child) for number in numbers}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        sys.exit(128 + received[0])
    if code < 0:
        raise click.ClickException(f"signal {-code} ended the process of the export; 9 may mean too little memory")
    if code:
        sys.exit(code)


def _end_once(*_: object) -> None:
    """Exit by an exception, so that drafts are removed. The parent says why."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)
