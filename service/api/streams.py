"""Open decode streams and their limits: idle time, lifetime, revoked keys and shutdown."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from preblock.service.core.auth import Authenticator, caller
from preblock.service.core.errors import Unavailable
from preblock.service.core.settings import LiveSettings
from preblock.service.observability.metrics import Metrics

T = TypeVar("T")
Reason = Literal["close", "shutdown", "left", "idle", "time", "key"]


class StreamEnd(Exception):
    """The end of a stream, with the reason for its client."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class StreamLifetime:
    """The limits of one stream, until `close`.

    Args:
        idle: maximum time of a wait for the client, in seconds.
        total: maximum lifetime of the stream, in seconds.

    """

    def __init__(self, idle: float, total: float) -> None:
        self.caller = caller()
        self._loop = asyncio.get_running_loop()
        self._idle = idle
        self._end = self._loop.time() + total
        self._over: Reason | None = None
        self._since = 0.0
        self._waiting: asyncio.Task[object] | None = None
        # One timer for all waits, because a timer for each wait would cost more than a step.
        self._timer = self._loop.call_later(min(idle, total), self._check_limits)

    async def wait(self, action: Callable[[], Awaitable[T]]) -> T:
        """Return the result of an action with a wait for the client.

        Raises:
            StreamEnd: the stream has reached a limit, the client has left, or the service shuts down.

        """
        # Checked here too, because the timer cannot interrupt an action without a wait.
        self._since = self._loop.time()
        if reason := self._end_reason():
            raise StreamEnd(reason)
        task = self._waiting = asyncio.current_task()
        try:
            return await action()
        except asyncio.CancelledError:
            # The cancellation came from `end`, unless the task itself was cancelled too.
            reason = self._end_reason()
            if reason is not None and task is not None and not task.uncancel():
                raise StreamEnd(reason) from None
            raise
        finally:
            self._waiting = None

    def touch(self) -> bool:
        """Restart the idle time during a `wait`, after an answered message. Return whether the stream stays open."""
        self._since = self._loop.time()
        return self._end_reason() is None

    def _end_reason(self) -> Reason | None:
        return self._over or ("time" if self._since >= self._end else None)

    def _check_limits(self) -> None:
        """End the stream if a limit is reached; otherwise check again at the next limit."""
        now = self._loop.time()
        idle = (self._since if self._waiting else now) + self._idle
        if now >= self._end:
            self.end("time")
        elif now >= idle:
            self.end("idle")
        else:
            self._timer = self._loop.call_at(min(idle, self._end), self._check_limits)

    def end(self, reason: Reason) -> None:
        """End the stream at its current or next wait."""
        self._over = reason
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def close(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()


class StreamRegistry:
    """Registry of the open streams.

    Args:
        metrics: counts the streams.
        settings: limits of the number of streams, their lifetime and their idle time.

    """

    def __init__(self, metrics: Metrics, settings: LiveSettings) -> None:
        self._metrics, self._settings = metrics, settings
        self._open: set[StreamLifetime] = set()

    @contextmanager
    def open(self) -> Iterator[StreamLifetime]:
        """Open a stream for the duration of the block.

        Raises:
            Unavailable: too many streams are open.

        """
        settings = self._settings.current
        if len(self._open) >= (most := settings.max_concurrent_streams):
            message = f"{most} streams are open, the most at a time; try again later"
            raise Unavailable("streams", f"one more than {most}", f"at most {most}", message=message)
        lifetime = StreamLifetime(settings.stream_idle_timeout_seconds, settings.stream_max_lifetime_seconds)
        self._open.add(lifetime)
        try:
            with self._metrics.stream():
                yield lifetime
        finally:
            lifetime.close()
            self._open.discard(lifetime)

    async def watch_keys(self, access: Authenticator) -> None:
        """Reload the API keys, and end the streams of removed and changed ones, until cancelled."""
        while access.needs_key:
            await access.poll()
            for lifetime in self._open:
                if not access.knows(lifetime.caller):
                    lifetime.end("key")

    def drain(self) -> None:
        """End every stream with a close message."""
        for lifetime in self._open:
            lifetime.end("shutdown")
