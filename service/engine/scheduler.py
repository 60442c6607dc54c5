"""Decides when and where work runs: small pieces in the event loop, the smallest together, large ones in a pool."""

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from preblock.service.core.errors import Unavailable
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.runtime.session import INLINE_MAX_VALUES

T = TypeVar("T")
M = TypeVar("M")

TEXT_COST = 32
"""Reading a byte of JSON, or writing a number as text, takes as long as this many values."""
TOKENIZER_COST = 2**11
"""Tokenizing a character takes as long as this many values."""

TOKEN_COST = 32
"""Checking a token and counting its position takes as long as this many values."""


class MicroBatch(Generic[M, T]):
    """Members that are ready in one turn of the event loop; they run together when the first asks for its answer.

    Args:
        run: returns the answer to each of some members.
        end: called with the group when no more may join.

    """

    __slots__ = ("_answers", "_end", "_joined", "_members", "_run", "size")

    def __init__(self, run: Callable[[list[M]], list[T]], end: Callable[["MicroBatch[M, T]"], object]) -> None:
        self.size = self._joined = 0
        self._members: dict[int, M] = {}
        self._answers: dict[int, T | Exception] | None = None
        self._run, self._end = run, end

    def join(self, size: int, member: M) -> int:
        """Add a member, and return its number."""
        self.size += size
        number = self._joined = self._joined + 1
        self._members[number] = member
        return number

    def leave(self, number: int) -> None:
        """Forget a member."""
        del self._members[number]

    def answer(self, number: int) -> T:
        """Return the answer to a member once the turn is over; the first call runs all members."""
        if self._answers is None:
            self._end(self)
            if len(self._members) == 1:
                (alone,) = self._run([*self._members.values()])
                return alone
            self._answers = _run_all(self._members, self._run)
        answer = self._answers[number]
        if isinstance(answer, Exception):
            raise answer
        return answer


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
        self._groups: dict[Hashable, MicroBatch[Any, Any]] = {}

    @staticmethod
    def is_small(size: int, text: bool = False) -> bool:
        """Return whether work of such a `size`, as `run` counts it, is not worth a thread."""
        return size * (TEXT_COST if text else 1) <= INLINE_MAX_VALUES

    async def run(self, size: int, work: Callable[[], T], text: bool = False) -> T:
        """Return the result of `work`; a `size` of at most `INLINE_MAX_VALUES` is not worth a thread.

        `size` counts values of arrays or bytes; with `text`, bytes of JSON or numbers as text.

        Raises:
            Unavailable: too many pieces wait already, or this one has waited too long.

        """
        if self.is_small(size, text):
            return work()
        settings = self._settings.current
        if self._pending >= self._threads + settings.max_queue_size:
            waiting = f"{settings.max_queue_size} waiting"
            raise Unavailable("queue", f"a request more than {waiting}", f"at most {waiting}; try again later")
        self._pending += 1
        try:
            # In the context of the request: the thread knows the caller too.
            return await self._result(
                self._pool.submit(contextvars.copy_context().run, work), settings.queue_timeout_seconds
            )
        finally:
            self._pending -= 1

    async def _result(self, future: Future[T], timeout: float) -> T:
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
            waited = f"{timeout:g} s"
            raise Unavailable("queue", f"more than {waited} in it", f"at most {waited}; try again later") from None
        finally:
            timer.cancel()

    def group(self, key: Hashable, size: int, run: Callable[[list[M]], list[T]]) -> MicroBatch[M, T]:
        """Return the group of this `key` for a member of `size` in this turn of the event loop.

        `size` counts values of arrays; members of more than `INLINE_MAX_VALUES` in all run in several groups, so that
        no group holds the loop for long.
        """
        group = self._groups.get(key)
        if group is None or group.size + size > INLINE_MAX_VALUES:
            group = self._groups[key] = MicroBatch(run, partial(self._close, key))
        return group

    async def share(self, key: Hashable, size: int, member: M, run: Callable[[list[M]], list[T]]) -> T:
        """Return the answer of `run` to `member`; members of this `key` that are ready in the same turn run together.

        There is no timer: a member waits until everything that is ready has joined, and alone for nothing. Where a run
        fails, each member runs by itself and meets its own error.
        """
        group: MicroBatch[M, T] = self.group(key, size, run)
        number = group.join(size, member)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            group.leave(number)
            raise
        return group.answer(number)

    def _close(self, key: Hashable, group: MicroBatch[M, T]) -> None:
        if self._groups.get(key) is group:
            del self._groups[key]

    def close(self) -> None:
        """Finish the work that runs and take no more."""
        self._pool.shutdown()


def _run_all(members: dict[int, M], run: Callable[[list[M]], list[T]]) -> dict[int, T | Exception]:
    """Return the answer to each member, by its number."""
    try:
        return dict(zip(members, run([*members.values()]), strict=True))
    except Exception:
        pass  # one of them may be at fault: it fails alone
    answers: dict[int, T | Exception] = {}
    for number, member in members.items():
        try:
            (answers[number],) = run([member])
        except Exception as error:
            answers[number] = error
    return answers
