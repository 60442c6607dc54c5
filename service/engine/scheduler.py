"""Decides when and where work runs: small pieces in the event loop, the smallest together, large ones in a pool."""

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from preblock.service.core.errors import Unavailable
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.runtime.session import INLINE_MAX_VALUES

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")
BatchFunction = Callable[[list[ItemT]], list[ResultT]]

TEXT_COST = 32
"""Reading a byte of JSON, or writing a number as text, takes as long as this many values."""
TOKENIZER_COST = 2**11
"""Tokenizing a character takes as long as this many values."""

TOKEN_COST = 32
"""Checking a token and counting its position takes as long as this many values."""


class MicroBatch(Generic[ItemT, ResultT]):
    """Items that are ready in one event-loop iteration; they run together when the first result is requested.

    Args:
        run: returns the result of each of some items.
        batches: the batches that take further items, by key; this one leaves them when it runs.
        key: of this batch.

    """

    __slots__ = ("_batches", "_items", "_key", "_last_number", "_results", "_run", "size")

    def __init__(self, run: BatchFunction[ItemT, ResultT], batches: dict[Hashable, Any], key: Hashable) -> None:
        self.size = self._last_number = 0
        self._items: dict[int, ItemT] = {}
        self._results: dict[int, ResultT | Exception] | None = None
        self._run, self._batches, self._key = run, batches, key

    def join(self, size: int, item: ItemT) -> int:
        """Add an item, and return its number."""
        self.size += size
        number = self._last_number = self._last_number + 1
        self._items[number] = item
        return number

    def leave(self, number: int) -> None:
        """Remove an item."""
        del self._items[number]

    def result(self, number: int) -> ResultT:
        """Return the result of an item in the next event-loop iteration; the first call runs all items."""
        if self._results is None:
            if self._batches.get(self._key) is self:
                del self._batches[self._key]
            if len(self._items) == 1:
                return self._run([*self._items.values()])[0]
            self._results = self._run_all()
        result = self._results[number]
        if isinstance(result, Exception):
            raise result
        return result

    def _run_all(self) -> dict[int, ResultT | Exception]:
        """Return the result of each item by its number; if the batch fails, each item runs alone."""
        try:
            return dict(zip(self._items, self._run([*self._items.values()]), strict=True))
        except Exception:
            pass  # one item may be at fault: it fails alone
        results: dict[int, ResultT | Exception] = {}
        for number, item in self._items.items():
            try:
                (results[number],) = self._run([item])
            except Exception as error:
                results[number] = error
        return results


class Scheduler:
    """Runs work for the event loop.

    Args:
        threads: of the pool; sessions and encoders release the interpreter while they work.
        settings: say how many pieces of work may wait for a thread, and for how long.

    """

    def __init__(self, threads: int, settings: LiveSettings) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="preblock")
        self._threads = threads
        self._settings = settings
        self._pending = 0
        self._batches: dict[Hashable, MicroBatch[Any, Any]] = {}

    @staticmethod
    def is_inline(size: int, text: bool = False) -> bool:
        """Return whether work of such a `size`, as `run` counts it, is not worth a thread."""
        return size * (TEXT_COST if text else 1) <= INLINE_MAX_VALUES

    async def run(self, size: int, work: Callable[[], ResultT], text: bool = False) -> ResultT:
        """Return the result of `work`; a `size` of at most `INLINE_MAX_VALUES` is not worth a thread.

        `size` counts values of arrays or bytes; with `text`, bytes of JSON or numbers as text.

        Raises:
            Unavailable: too many pieces wait already, or this one has waited too long.

        """
        if self.is_inline(size, text):
            return work()
        settings = self._settings.current
        if self._pending >= self._threads + settings.max_queue_size:
            allowed = f"at most {settings.max_queue_size} waiting; try again later"
            raise Unavailable("queue", "a full queue", allowed)
        self._pending += 1
        try:
            # The thread runs in the context of the request, so that it knows the caller.
            future = self._pool.submit(contextvars.copy_context().run, work)
            return await self._result(future, settings.queue_timeout_seconds)
        finally:
            self._pending -= 1

    async def _result(self, future: Future[ResultT], timeout: float) -> ResultT:
        """Return the result of a piece of work that begins in time."""
        loop, expired = asyncio.get_running_loop(), False

        def expire() -> None:
            nonlocal expired
            expired = future.cancel()  # does nothing once the work has begun

        timer = loop.call_later(timeout, expire)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not expired:
                raise
            allowed = f"at most {timeout:g} s; try again later"
            raise Unavailable("queue", f"a wait of more than {timeout:g} s", allowed) from None
        finally:
            timer.cancel()

    def batch(self, key: Hashable, size: int, run: BatchFunction[ItemT, ResultT]) -> MicroBatch[ItemT, ResultT]:
        """Return the batch of this `key` for a item of `size` in this turn of the event loop.

        `size` counts values of arrays; items of more than `INLINE_MAX_VALUES` in all run in several batches, so that
        no batch holds the loop for long.
        """
        batch = self._batches.get(key)
        if batch is None or batch.size + size > INLINE_MAX_VALUES:
            batch = self._batches[key] = MicroBatch(run, self._batches, key)
        return batch

    async def run_batched(self, key: Hashable, size: int, item: ItemT, run: BatchFunction[ItemT, ResultT]) -> ResultT:
        """Return the result of `run` to `item`; items of this `key` that are ready in the same turn run together.

        There is no timer: a item waits until everything that is ready has joined, and alone for nothing. Where a run
        fails, each item runs by itself and meets its own error.
        """
        batch: MicroBatch[ItemT, ResultT] = self.batch(key, size, run)
        number = batch.join(size, item)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            batch.leave(number)
            raise
        return batch.result(number)

    def close(self) -> None:
        """Finish the work that runs and take no more."""
        self._pool.shutdown()
