"""The deadline of a connection that waits for its client."""

import asyncio
from collections.abc import Callable

NEVER = float("inf")


class Deadline:
    """One timer for many deadlines. It is seldom moved, since nearly all deadlines are cleared before they pass.

    Args:
        loop: of the connection.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = NEVER
        self._action: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a time, unless this is called or cleared before."""
        self._time, self._action = self._loop.time() + seconds, action
        if self._timer is not None and self._timer.when() > self._time:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._time, self._check)

    def is_set(self, action: Callable[[], None]) -> bool:
        """Return whether this action has the deadline."""
        return self._time != NEVER and self._action == action

    def clear(self) -> None:
        """Do nothing, until it is set again."""
        self._time = NEVER

    def cancel(self) -> None:
        """Forget the timer."""
        self._time = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._time == NEVER or self._action is None:
            return
        if self._loop.time() < self._time:
            self._timer = self._loop.call_at(self._time, self._check)
        else:
            self._time = NEVER
            self._action()
