"""Polling for a state that a server reaches a little later."""

import time
from collections.abc import Callable


def wait_until(seen: Callable[[], object], seconds: float = 30, pause: float = 0.02) -> None:
    """Call `seen` until it returns a true value.

    Args:
        seen: condition.
        seconds: limit; default 30.
        pause: seconds between two calls; default 0.02.

    Raises:
        AssertionError: the condition is still false at the limit.

    """
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, f"nothing changed for {seconds} s"
        time.sleep(pause)
