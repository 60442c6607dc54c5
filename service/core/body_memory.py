"""Memory for large bodies of requests and of responses: a bound for all connections, and its return to the system."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
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


def capacity_for(largest: int) -> int:
    """Return the bound in bytes, given the largest allowed body."""
    return MAX_LARGEST_BODIES * largest


class BodyMemory:
    """Bounds the bytes of large request bodies in progress: expanded and parsed. Further bodies wait in order.

    Args:
        settings: largest body, size and timeout of the queue.
        free: returns free memory to the system, in a thread; default: `return_free_memory`.

    """

    kind, others = "body", "request bodies"

    def __init__(self, settings: LiveSettings, free: Callable[[], None] = return_free_memory) -> None:
        self._settings, self._free = settings, free
        self._reserved = 0
        self._released = 0  # since the last return of memory
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def _largest(self) -> int:
        """Bytes of the largest allowed body."""
        return self._settings.current.max_body_bytes

    @property
    def _capacity(self) -> int:
        return capacity_for(self._largest)

    @property
    def is_awaited(self) -> bool:
        """Whether a body waits for memory."""
        return bool(self._waiting)

    def take(self, size: int) -> int | None:
        """Reserve memory as `reserve`, but return None in place of a wait."""
        if size < LARGE_BODY_BYTES:
            return 0
        size = min(size, self._capacity)
        if self._waiting or self._reserved + size > self._capacity:
            return None
        self._reserved += size
        return size

    async def reserve(self, size: int) -> int:
        """Reserve memory for a body of up to `size` bytes, if it is large; return the bytes for `release`.

        Raises:
            Unavailable: too many bodies wait, or this one has waited longer than the queue timeout.

        """
        reserved = self.take(size)
        if reserved is None:
            reserved = min(size, self._capacity)
            await self._wait(reserved)
        return reserved

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
            text = f"The server is busy with other large {self.others}, and {most} more wait. Retry later."
            raise Unavailable(self.kind, got, allowed, message=text)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, admitted))
        try:
            await asyncio.wait((admitted,), timeout=seconds)  # unlike `asyncio.timeout`, it needs no task
        except asyncio.CancelledError:
            if not self._give_up(admitted):
                self.release(size)
            raise
        if self._give_up(admitted):
            text = f"The {self.kind} waited {seconds:g} s for other large {self.others}. Retry later."
            raise Unavailable(self.kind, f"a wait of {seconds:g} s", f"at most {seconds:g} s", message=text)

    def _give_up(self, admitted: asyncio.Future[None]) -> bool:
        """Leave the queue; return False if the wait was over."""
        left = admitted.cancel()
        if left:
            self._admit()  # the next body may be smaller
        return left

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
        """Return the free memory of finished bodies. A client that does not read holds its own for minutes."""
        self._released = 0
        asyncio.get_running_loop().run_in_executor(None, self._free)


class ResponseMemory(BodyMemory):
    """Bounds the bytes of large responses in progress, from their computation until the client has read them."""

    kind, others = "response", "responses"

    @property
    def _largest(self) -> int:
        """Bytes of the largest buffered response."""
        return self._settings.current.max_buffered_response_bytes
