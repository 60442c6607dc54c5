"""How much may be asked at once, and how often by one caller."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from preblock.service.core.auth import caller_name
from preblock.service.core.errors import RateLimited, TooLarge, Unavailable
from preblock.service.core.settings_reload import LiveSettings

SWEEP_SECONDS = 10.0
"""Between two searches for callers without debt: they are forgotten."""
FLOAT32_BYTES = 4
"""Of a computed value, whatever the type of the answer."""


class Limits:
    """The limits of this process, as the settings have them now."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._running = 0
        # By caller: the time at which its debt ends, at its rate.
        self._spent: dict[str, float] = {}
        self._swept = time.monotonic()

    @property
    def max_rows(self) -> int:
        """Most rows of a request."""
        return self._settings.current.max_request_rows

    @property
    def max_buffered_bytes(self) -> int:
        """Most bytes of vectors, as float32, in an answer that is not sent in chunks."""
        return self._settings.current.max_buffered_response_bytes

    def enter(self) -> None:
        """Begin a request; `leave` must follow.

        Raises:
            RateLimited: the caller asks too often.
            Unavailable: too many are answered now.

        """
        settings = self._settings.current
        most, per_second = settings.max_concurrent_requests, settings.rate_limit_per_second
        if self._running >= most:  # first: a request refused here does not count for its caller
            raise Unavailable("requests", f"one more than {most}", f"{most} at a time; try again later")
        if per_second is not None:
            self._count(caller_name(), per_second, time.monotonic())
        self._running += 1

    def leave(self) -> None:
        """End a request."""
        self._running -= 1

    @contextmanager
    def extend(self) -> Iterator[None]:
        """Count an answered request while the rest of its answer is sent."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def check_rows(self, field: str, rows: int) -> None:
        """Raise TooLarge where a request has too many rows."""
        if rows > self.max_rows:
            raise TooLarge(field, f"{rows} rows", f"at most {self.max_rows} rows in a request")

    def takes_whole(self, values: int) -> bool:
        """Return whether an answer of so many values may be made whole."""
        return FLOAT32_BYTES * values <= self.max_buffered_bytes

    def check_whole(self, field: str, values: int) -> None:
        """Raise TooLarge where an answer of so many values may not be made whole."""
        if not self.takes_whole(values):
            got, allowed = f"{FLOAT32_BYTES * values} bytes of vectors", f"at most {self.max_buffered_bytes}"
            raise TooLarge(field, got, f"{allowed} in an answer that is made whole")

    def _count(self, caller: str, per_second: float, now: float) -> None:
        """Count a request of a caller, by the generic cell rate algorithm (ITU-T I.371)."""
        if now - self._swept > SWEEP_SECONDS:
            self._spent = {name: until for name, until in self._spent.items() if until > now}
            self._swept = now
        interval = 1 / per_second
        # The rate may have been lower before: a caller never owes more than a second, or one interval.
        until = self._spent[caller] = min(max(self._spent.get(caller, now), now), now + max(1, interval))
        # The requests of a second may come at once; sums of fractions are not exact.
        wait = until - now - max(1 - interval, 0)
        if wait > 1e-6:
            allowed = f"at most {per_second:g} a second"
            raise RateLimited("requests", f"more than {per_second:g} a second", allowed, math.ceil(wait))
        self._spent[caller] = until + interval
