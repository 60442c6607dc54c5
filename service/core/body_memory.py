"""Memory for large request bodies: one bound for all connections of a process, and its return to the system."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preblock.service.core.errors import Unavailable
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.core.system import return_free_memory

LARGE_BODY_BYTES = 2**18
"""Smaller bodies need no reservation: their memory is about that of their connection."""
MAX_LARGEST_BODIES = 4
"""The bound, in bodies of the largest allowed size."""
RETURN_DELAY_SECONDS = 1.0
"""Time without a large body until free memory is returned: a later body would fetch it again."""
MIN_RETURNED_BYTES = 2**26
"""Smaller amounts stay for reuse, because fresh memory is slower."""


class BodyMemory:
    """Bounds the bytes of large bodies in progress: expanded, parsed or computed. Further bodies wait in order.

    Args:
        settings: largest body, size and timeout of the queue.

    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._reserved = 0
        self._released = 0  # since the last return of memory
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _capacity(self) -> int:
        return MAX_LARGEST_BODIES * self._settings.current.max_body_bytes

    async def reserve(self, size: int) -> int:
        """Reserve memory for a body of up to `size` bytes, if it is large; return the bytes for `release`.

        Raises:
            Unavailable: too many bodies wait, or this one has waited longer than the queue timeout.

        """
        if size < LARGE_BODY_BYTES:
            return 0
        size = min(size, self._capacity)
        if not self._waiting and self._reserved + size <= self._capacity:
            self._reserved += size
        else:
            await self._wait(size)
        return size

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Reserve memory for a body of up to `size` bytes while the block runs, with the errors of `reserve`."""
        reserved = await self.reserve(size)
        try:
            yield
        finally:
            self.release(reserved)

    async def _wait(self, size: int) -> None:
        settings = self._settings.current
        most, seconds = settings.max_queue_size, settings.queue_timeout_seconds
        if len(self._waiting) >= most:
            got, allowed = f"more than {most} waiting", f"at most {most} waiting"
            text = f"The server is busy with other large request bodies, and {most} more wait. Retry later."
            raise Unavailable("body", got, allowed, message=text)
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()
        expired = asyncio.Event()
        # Not `asyncio.timeout`, which needs a task: a short tensor request has none.
        timer = loop.call_later(seconds, _expire, admitted, expired)
        self._waiting.append((size, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted in the same iteration of the event loop
                self.release(size)
                raise
            self._admit()  # the next body may be smaller
            if not expired.is_set():
                raise
            text = f"The body waited {seconds:g} s for other large request bodies. Retry later."
            raise Unavailable("body", f"a wait of {seconds:g} s", f"at most {seconds:g} s", message=text) from None
        finally:
            timer.cancel()

    def release(self, size: int) -> None:
        """Release the memory of a body."""
        if not size:
            return
        self._reserved -= size
        self._admit()
        self.drop(size)

    def drop(self, size: int) -> None:
        """Return the memory of `size` bytes of bodies that are over, complete or not, to the system soon."""
        self._released += size
        if self._released >= MIN_RETURNED_BYTES:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(RETURN_DELAY_SECONDS, self._return)

    def _admit(self) -> None:
        while self._waiting:
            size, admitted = self._waiting[0]
            if not admitted.cancelled():
                if self._reserved + size > self._capacity:
                    return
                self._reserved += size
                admitted.set_result(None)
            self._waiting.popleft()

    def _return(self) -> None:
        """Return the free memory of finished bodies; later, if others are in progress."""
        if not self._reserved:
            self._released = 0
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)


def _expire(admitted: asyncio.Future[None], expired: asyncio.Event) -> None:
    """End a wait, and set `expired`."""
    if admitted.cancel():
        expired.set()
