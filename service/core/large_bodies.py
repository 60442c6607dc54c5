"""Large bodies of requests and of responses: bounds of their memory for all connections, and turns of their writing."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from preblock.service.core.errors import Unavailable
from preblock.service.core.settings import LiveSettings
from preblock.service.core.system import return_free_memory

LARGE_BODY_BYTES = 2**18
"""Smaller bodies need no reservation: their memory is about that of their connection."""
MAX_LARGEST_BODIES = 4
"""The bound, in bodies of the largest allowed size."""
RETURN_DELAY_SECONDS = 1.0
"""Time without a large body until free memory is returned: a later body would fetch it again."""
MIN_RETURNED_BYTES = 2**26
"""Smaller amounts stay for reuse, because fresh memory is slower."""
MAX_READ_BYTES = 2**16
"""About the bytes that a connection reads at once."""


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
        capacity = self._capacity
        size = min(size, capacity)
        if self._waiting or self._reserved + size > capacity:
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
                # The limit may have been higher when the wait began.
                if self._reserved and self._reserved + size > self._capacity:
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


class WriteTurns:
    """Lets one large response compute and write a chunk in each iteration of the event loop, in order."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, next_chunk: bool = True) -> None:
        """Wait for a turn; a response that is alone waits for the next iteration only, and not for its first chunk."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._give)
            if next_chunk:
                await asyncio.sleep(0)  # unlike a future, it needs no task

    def _give(self) -> None:
        """Give the turn to the next response."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give)
                return
        self._taken = False
