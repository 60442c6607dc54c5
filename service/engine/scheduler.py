"""Scheduler: runs small work in the event loop, the smallest requests in micro-batches, and large work in threads."""

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from preblock.service.core.errors import ENDS, Unavailable
from preblock.service.core.settings import LiveSettings
from preblock.service.runtime.session import INLINE_MAX_VALUES

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")
BatchFunction = Callable[[list[ItemT]], list[ResultT]]

TEXT_COST = 32
"""Cost of one byte of JSON read, or one number written as text, in values."""
TOKENIZER_COST = 2**11
"""Cost of one character tokenized, in values."""

TOKEN_COST = 32
"""Cost of one token validated and its position counted, in values."""


def contain(work: Callable[[], ResultT]) -> ResultT:
    """Return the result of `work`. A panic of a library in Rust, which is no `Exception`, becomes a RuntimeError.

    Handlers of requests take an `Exception` for an error, and anything else for the end of the process.
    """
    try:
        return work()
    except (Exception, *ENDS):
        raise
    except BaseException as error:
        raise RuntimeError(f"a library failed with {type(error).__name__}: {error}") from error


class MicroBatch(Generic[ItemT, ResultT]):
    """Items of one event-loop iteration; they run together when the first result is requested.

    Args:
        run: returns the results of a list of items.
        batches: the open batches by key; the batch removes itself when it runs.
        key: key of this batch.

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
        """Remove an item. A batch without items would keep its model open."""
        del self._items[number]
        if not self._items:
            self._close()

    def result(self, number: int) -> ResultT:
        """Return the result of an item, in the next event-loop iteration. The first call runs all items."""
        if self._results is None:
            self._close()
            if len(self._items) == 1:
                return self._run([*self._items.values()])[0]
            self._results = self._run_all()
        result = self._results.pop(number)
        try:
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            del result  # the traceback of an error holds this frame, and such a cycle would keep the items

    def _close(self) -> None:
        """Take no further items."""
        if self._batches.get(self._key) is self:
            del self._batches[self._key]

    def _run_all(self) -> dict[int, ResultT | Exception]:
        """Return the result of each item by its number; if the batch fails, each item runs alone."""
        try:
            return dict(zip(self._items, self._run([*self._items.values()]), strict=True))
        except Exception:
            pass  # one item may be at fault, so each runs alone
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
        threads: number of threads; sessions and encoders release the GIL while they run.
        settings: size and timeout of the work queue.

    """

    def __init__(self, threads: int, settings: LiveSettings) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="preblock")
        self._threads = threads
        self._settings = settings
        self._pending = 0
        self._batches: dict[Hashable, MicroBatch[Any, Any]] = {}

    def queue_depth(self) -> int:
        """Return the number of work items waiting for a thread."""
        return max(0, self._pending - self._threads)

    @staticmethod
    def is_inline(size: int, text: bool = False) -> bool:
        """Return whether work of this `size` runs in the event loop, because a thread would cost more; see `run`."""
        return size * (TEXT_COST if text else 1) <= INLINE_MAX_VALUES

    async def run(self, size: int, work: Callable[[], ResultT], text: bool = False) -> ResultT:
        """Return the result of `work`, from the event loop up to a cost of `INLINE_MAX_VALUES`, else from a thread.

        `size` counts array values or bytes. If `text` is true, it counts bytes of JSON or numbers written as text.

        Raises:
            Unavailable: the work queue is full, or the work has waited longer than the queue timeout.

        """
        if self.is_inline(size, text):
            return contain(work)
        settings = self._settings.current
        if self._pending >= self._threads + settings.max_queue_size:
            most = settings.max_queue_size
            message = f"the queue is full: {most} requests wait, the limit; try again later"
            raise Unavailable("queue", "a full queue", f"at most {most} waiting", message=message)
        self._pending += 1
        try:
            # The thread runs in the context of the request, so that it knows the caller.
            # No frame above `_result` may hold the future; see there.
            result = self._result(
                self._pool.submit(contextvars.copy_context().run, contain, work), settings.queue_timeout_seconds
            )
            return await result
        finally:
            self._pending -= 1

    async def _result(self, future: Future[ResultT], timeout: float) -> ResultT:
        """Return the result of a future, or cancel it if it has not started after `timeout` seconds."""
        expired = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(timeout, _expire, future, expired)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not expired.is_set():
                raise
            message = f"the request waited more than {timeout:g} s in the queue; try again later"
            got, allowed = f"a wait of more than {timeout:g} s", f"at most {timeout:g} s"
            raise Unavailable("queue", got, allowed, message=message) from None
        finally:
            timer.cancel()
            # The future holds the exception of the work, and the exception this frame. Such a cycle would keep the
            # body of a rejected request until the next garbage collection, which may be hours away.
            del future

    def batch(self, key: Hashable, size: int, run: BatchFunction[ItemT, ResultT]) -> MicroBatch[ItemT, ResultT]:
        """Return the batch of this event-loop iteration with `key`, for an item of `size` array values.

        A batch has at most `INLINE_MAX_VALUES` values, so that it does not block the event loop for long.
        """
        batch = self._batches.get(key)
        if batch is None or batch.size + size > INLINE_MAX_VALUES:
            batch = self._batches[key] = MicroBatch(run, self._batches, key)
        return batch

    async def run_batched(self, key: Hashable, size: int, item: ItemT, run: BatchFunction[ItemT, ResultT]) -> ResultT:
        """Run `item` in one batch with all items of this `key` in the same event-loop iteration, and return its result.

        No timer delays the batch: an item waits for the end of the iteration only. If the batch fails, each item runs
        alone, and only the faulty items raise.
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
        """Finish running work, and accept no further work."""
        self._pool.shutdown()


def _expire(future: Future[Any], expired: asyncio.Event) -> None:
    """Cancel work that has not started, and set `expired`."""
    if future.cancel():
        expired.set()
