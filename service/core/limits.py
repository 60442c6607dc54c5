"""How much may be asked at once, and how often by one caller."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from preblock.service.core.auth import caller_name
from preblock.service.core.errors import RateLimited, TooLarge, Unavailable

SWEEP_SECONDS = 10.0
"""Between two looks for callers that have been quiet for long enough to be forgotten."""
FLOAT32_BYTES = 4
"""Of a value, as which it is computed, whatever the type of the answer."""


class Limits:
    """The limits of this process; each request runs within a `with` block of them.

    Args:
        requests: most that are answered at a time; default None: any number.
        per_second: most of one caller in a second, of which as many may come at once; default None: any number.
        rows: most of one request; default None: any number.
        whole: most bytes of vectors, as float32, in an answer that is made whole; default None: any number.

    """

    def __init__(
        self,
        requests: int | None = None,
        per_second: float | None = None,
        rows: int | None = None,
        whole: int | None = None,
    ) -> None:
        self.allow(requests, per_second, rows, whole)
        self._running = 0
        self._swept = time.monotonic()

    def allow(self, requests: int | None, per_second: float | None, rows: int | None, whole: int | None) -> None:
        """Allow so much from now on; the arguments are those of the class."""
        # By caller: when all that it was allowed would have been used up, at its rate.
        self._spent: dict[str, float] = {}
        self._requests, self._per_second, self.rows = requests or math.inf, per_second, rows or math.inf
        self.whole = whole or math.inf

    def enter(self) -> None:
        """Begin a request; `leave` must follow.

        Raises:
            RateLimited: the caller asks too often.
            Unavailable: too many are answered now.

        """
        if self._running >= self._requests:  # first: what is refused so is not held against its caller
            raise Unavailable(
                "requests", f"one more than {self._requests}", f"{self._requests} at a time; try again later"
            )
        if self._per_second is not None:
            self._count(caller_name(), self._per_second, time.monotonic())
        self._running += 1

    def leave(self) -> None:
        """End a request."""
        self._running -= 1

    @contextmanager
    def extend(self) -> Iterator[None]:
        """Count a request that was answered within the limits for as long as the rest of its answer is sent."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def check_rows(self, field: str, rows: int) -> None:
        """Raise TooLarge where a request has too many rows."""
        if rows > self.rows:
            raise TooLarge(field, f"{rows} rows", f"at most {self.rows} rows in a request")

    def takes_whole(self, values: int) -> bool:
        """Return whether an answer of so many values may be made whole."""
        return FLOAT32_BYTES * values <= self.whole

    def check_whole(self, field: str, values: int) -> None:
        """Raise TooLarge where an answer of so many values may not be made whole."""
        if not self.takes_whole(values):
            got, allowed = f"{FLOAT32_BYTES * values} bytes of vectors", f"at most {self.whole}"
            raise TooLarge(field, got, f"{allowed} in an answer that is made whole")

    def _count(self, caller: str, per_second: float, now: float) -> None:
        """Count a request of a caller, by the generic cell rate algorithm (ITU-T I.371)."""
        if now - self._swept > SWEEP_SECONDS:
            self._spent = {name: until for name, until in self._spent.items() if until > now}
            self._swept = now
        interval = 1 / per_second
        until = max(self._spent.get(caller, now), now)
        # What a second holds may come at once; sums of fractions are not exact.
        wait = until - now - max(1 - interval, 0)
        if wait > 1e-6:
            allowed = f"at most {per_second:g} a second"
            raise RateLimited("requests", f"more than {per_second:g} a second", allowed, math.ceil(wait))
        self._spent[caller] = until + interval
