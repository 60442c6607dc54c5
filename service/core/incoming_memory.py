"""Memory for large bodies and messages while they arrive: one bound for all connections but those of gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from preblock.service.core.body_memory import LARGE_BODY_BYTES, capacity_for
from preblock.service.core.errors import Unavailable
from preblock.service.core.settings_reload import LiveSettings

MAX_READ_BYTES = 2**16
"""About the bytes that a connection reads at once."""


class IncomingBody:
    """A large body or message from its first bytes until its handler has reserved memory for it or answers it.

    Args:
        memory: bounds its bytes.
        resume: called when the body may be read on.
        refuse: called when the body takes too long; it must then end.

    """

    def __init__(self, memory: "IncomingMemory", resume: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._memory, self.resume, self.refuse = memory, resume, refuse
        self.size, self.began, self.paused = 0, 0.0, False

    def grow(self, size: int) -> bool:
        """Count `size` bytes that have arrived in all; return False to read no more until `resume`."""
        return size < LARGE_BODY_BYTES or self._memory.grow(self, size)

    def complete(self) -> None:
        """Keep the memory of the complete body, which is not refused any more."""
        self._memory.complete(self)

    def end(self) -> None:
        """Release the memory."""
        self._memory.end(self)


class IncomingMemory:
    """Bounds the bytes of large bodies that arrive.

    Beyond the bound, only the oldest incomplete body is read, so that one always ends. While others wait, a body that
    has taken longer than the queue timeout is refused: a slow client could hold its memory for hours.

    Args:
        settings: largest body, and the timeout of the queue.
        drop: returns the memory of bodies that were cut.

    """

    def __init__(self, settings: LiveSettings, drop: Callable[[int], None]) -> None:
        self._settings, self._drop = settings, drop
        self._held = 0
        self._arriving: dict[IncomingBody, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _capacity(self) -> int:
        return capacity_for(self._settings.current.max_body_bytes)

    @asynccontextmanager
    async def arrive(self) -> AsyncIterator["AwaitedBody"]:
        """Count a body that a task receives in the block.

        Raises:
            Unavailable: it took too long while other bodies waited for memory.

        """
        body = AwaitedBody(self)
        try:
            async with asyncio.timeout(None) as limit:
                body.refuse = lambda: limit.reschedule(0)
                yield body
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = self._settings.current.queue_timeout_seconds
            text = f"The body took more than {seconds:g} s while others waited for its memory. Retry later."
            raise Unavailable("body", f"more than {seconds:g} s", f"at most {seconds:g} s", message=text) from None
        finally:
            body.end()

    def grow(self, body: IncomingBody, size: int) -> bool:
        """Count the bytes of a large body; see `IncomingBody`."""
        if not body.size:
            body.began = asyncio.get_running_loop().time()
            self._arriving[body] = None
        self._held += size - body.size
        body.size = size
        body.paused = self._held > self._capacity and body is not next(iter(self._arriving), None)
        if body.paused and self._timer is None:
            self._check()
        return not body.paused

    def complete(self, body: IncomingBody) -> None:
        """Keep the memory of a complete body."""
        if body in self._arriving:
            del self._arriving[body]
            self._resume()

    def end(self, body: IncomingBody) -> None:
        """Release the memory of a body, complete or not."""
        size, body.size = body.size, 0
        if size:
            self._held -= size
            if body in self._arriving:
                del self._arriving[body]
                self._drop(size)
            self._resume()

    def _resume(self) -> None:
        """Read on: the oldest body, and others as long as their next bytes fit."""
        room = self._capacity - self._held
        for index, body in enumerate([*self._arriving]):
            if room < 0 and index:
                return
            if body.paused:
                room -= MAX_READ_BYTES
                body.paused = False
                body.resume()

    def _check(self) -> None:
        """Refuse slow bodies while others wait; check again when the next body becomes slow."""
        self._timer, loop = None, asyncio.get_running_loop()
        if not any(body.paused for body in self._arriving):
            return
        seconds = self._settings.current.queue_timeout_seconds
        slow = [body for body in self._arriving if loop.time() - body.began >= seconds]
        for body in slow:
            self._drop(body.size)
            del self._arriving[body]
            body.refuse()
        if slow:
            self._resume()
        if self._arriving:
            self._timer = loop.call_at(next(iter(self._arriving)).began + seconds, self._check)


class AwaitedBody(IncomingBody):
    """A body that a task receives; `IncomingMemory.arrive` makes it."""

    def __init__(self, memory: IncomingMemory) -> None:
        self._may_read = asyncio.Event()
        super().__init__(memory, self._may_read.set, lambda: None)

    async def wait(self, size: int) -> None:
        """Count `size` bytes that have arrived in all, and wait until more may be read."""
        if not self.grow(size):
            self._may_read.clear()
            await self._may_read.wait()
