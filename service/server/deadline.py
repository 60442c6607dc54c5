"""The deadline of a connection: it acts when the client is late."""

import asyncio
from collections.abc import Callable

NEVER = float("inf")


class Deadline:
    """One timer for many deadlines. The timer seldom moves, because nearly all deadlines are cleared in time.

    Args:
        loop: of the connection.

    Attributes:
        since: time when the deadline was last set or moved, on the clock of the loop.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.since = self._time = NEVER
        self._action: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`, unless the deadline is set again or cleared before."""
        self.since = self._loop.time()
        self._time, self._action = self.since + seconds, action
        if self._timer is not None and self._timer.when() > self._time:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._time, self._check)

    def extend(self, seconds: float, most: float) -> None:
        """Move the deadline by `seconds`, but to at most `most` seconds from now."""
        if self._action is not None:
            self.set(min(self._time - self._loop.time() + seconds, most), self._action)

    def is_set(self, action: Callable[[], None] | None = None) -> bool:
        """Return whether the deadline is set, with this action if one is given."""
        return self._time != NEVER and action in (None, self._action)

    def clear(self) -> None:
        """Do nothing until the deadline is set again."""
        self._time = NEVER

    def cancel(self) -> None:
        """Clear the deadline, and release the timer."""
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
