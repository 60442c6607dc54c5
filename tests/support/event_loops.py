"""Event loops with a time of their own."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    """Ends each wait at once, and counts its time."""

    waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout and 0)
        self.waited += 0 if found else timeout or 0
        return found


class WaitedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it waits for a timer: a busy machine changes nothing."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.waited
