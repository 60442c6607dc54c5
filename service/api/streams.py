"""The open decode streams, and every reason for their end except the client's own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from preblock.service.core.auth import Authenticator, caller
from preblock.service.core.errors import Unavailable
from preblock.service.core.file_watch import POLL_INTERVAL_SECONDS
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.metrics import Metrics

T = TypeVar("T")
Reason = Literal["close", "shutdown", "left", "idle", "time", "key"]
LIFETIME = "preblock.lifetime"
"""Key of a stream's lifetime in the state of its request: the connection ends it when the client leaves."""


class StreamEnd(Exception):
    """A stream ends; its client is told the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class StreamLifetime:
    """The time limits of one stream of the caller, until `close`.

    Args:
        idle: seconds that it may wait for its client.
        total: seconds that it may stay open.

    """

    def __init__(self, idle: float, total: float) -> None:
        self.caller = caller()
        self._loop = asyncio.get_running_loop()
        self._idle = idle
        self._end = self._loop.time() + total
        self._over: Reason | None = None
        self._since = 0.0
        self._waiting: asyncio.Task[object] | None = None
        # One timer for every wait: a timer for each would take longer than a step.
        self._timer = self._loop.call_later(min(idle, total), self._look)

    async def wait(self, action: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an action that waits for the client.

        Raises:
            Closing: the service shuts down, or the client has left or takes too long.

        """
        # An action without a wait would never be interrupted.
        self._since = self._loop.time()
        if reason := self._ended():
            raise StreamEnd(reason)
        task = self._waiting = asyncio.current_task()
        try:
            return await action()
        except asyncio.CancelledError:
            # The cancellation came from `end`, unless the task was cancelled too.
            if (reason := self._ended()) and task is not None and not task.uncancel():
                raise StreamEnd(reason) from None
            raise
        finally:
            self._waiting = None

    def touch(self) -> bool:
        """Count an answered message while `wait` goes on; return whether the stream stays open."""
        self._since = self._loop.time()
        return self._ended() is None

    def _ended(self) -> Reason | None:
        return self._over or ("time" if self._since >= self._end else None)

    def _look(self) -> None:
        """End the stream where its time is over, and look again when it may be."""
        now = self._loop.time()
        idle = (self._since if self._waiting else now) + self._idle
        if now >= self._end:
            self.end("time")
        elif now >= idle:
            self.end("idle")
        else:
            self._timer = self._loop.call_at(min(idle, self._end), self._look)

    def end(self, reason: Reason) -> None:
        """End the stream when it next waits, or now if it does."""
        self._over = reason
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def close(self) -> None:
        """Forget the timer."""
        self._timer.cancel()


class StreamRegistry:
    """The open streams.

    Args:
        metrics: counts them.
        settings: say how many may be open, how long each, and how long one may wait for its client.

    """

    def __init__(self, metrics: Metrics, settings: LiveSettings) -> None:
        self._metrics, self._settings = metrics, settings
        self._open: set[StreamLifetime] = set()

    @contextmanager
    def open(self) -> Iterator[StreamLifetime]:
        """Open a stream, until the block ends.

        Raises:
            Unavailable: too many are open.

        """
        settings = self._settings.current
        if len(self._open) >= (most := settings.max_concurrent_streams):
            raise Unavailable("streams", f"one more than {most}", f"{most} open at a time; try again later")
        lifetime = StreamLifetime(settings.stream_idle_timeout_seconds, settings.stream_max_lifetime_seconds)
        self._open.add(lifetime)
        try:
            with self._metrics.stream():
                yield lifetime
        finally:
            lifetime.close()
            self._open.discard(lifetime)

    async def follow(self, access: Authenticator) -> None:
        """End the streams of removed and changed keys, until cancelled."""
        while access.needs_key:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            access.reload()
            for lifetime in self._open:
                if not access.knows(lifetime.caller):
                    lifetime.end("key")

    def drain(self) -> None:
        """End every stream, each with a word to its client."""
        for lifetime in self._open:
            lifetime.end("shutdown")
