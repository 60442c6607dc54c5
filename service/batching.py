"""Decides when and where work runs: small pieces in the event loop, the smallest together, large ones in a pool."""

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from incipit.service.errors import Unavailable

T = TypeVar("T")
M = TypeVar("M")

SMALL = 2**19
"""Values of an array, and bytes that are only copied, that are handled in a few tenths of a millisecond."""
TEXT_COST = 32
"""A byte of JSON that is read, or a number that is written as text, takes as long as this many values."""
TOKENIZER_COST = 2**11
"""A character of text that becomes token ids takes as long as this many values."""


@dataclass(slots=True)
class _Group(Generic[M, T]):
    """Members that are ready in one turn of the event loop, and what each was answered with once they ran."""

    members: dict[int, M] = field(default_factory=dict)
    joined: int = 0
    size: int = 0
    answers: dict[int, T | Exception] | None = None


class Scheduler:
    """Runs work for the event loop.

    Args:
        threads: of the pool; sessions and encoders release the interpreter while they work.
        max_waiting: pieces that may wait for a thread; one more is refused.
        max_seconds: that a piece may wait for a thread; default None: any time.

    """

    def __init__(self, threads: int, max_waiting: int, max_seconds: float | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="incipit")
        self._limit = threads + max_waiting
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._pending = 0
        self._groups: dict[Hashable, _Group[Any, Any]] = {}

    async def run(self, size: int, work: Callable[[], T], text: bool = False) -> T:
        """Return what `work` returns; a `size` of at most `SMALL` is not worth a thread.

        `size` counts values of arrays or bytes; with `text`, bytes of JSON or numbers that become text.

        Raises:
            Unavailable: too many pieces wait already, or this one has waited too long.

        """
        if size * (TEXT_COST if text else 1) <= SMALL:
            return work()
        if self._pending >= self._limit:
            waiting = f"{self._max_waiting} waiting"
            raise Unavailable("queue", f"a request more than {waiting}", f"at most {waiting}; try again later")
        self._pending += 1
        try:
            # In the context of the request: who asks is known in the thread too.
            return await self._result(self._pool.submit(contextvars.copy_context().run, work))
        finally:
            self._pending -= 1

    async def _result(self, future: Future[T]) -> T:
        """Return what a piece returns, unless it has not begun in time."""
        loop, expired = asyncio.get_running_loop(), False

        def expire() -> None:
            nonlocal expired
            expired = future.cancel()  # does nothing to what has begun

        timer = None if self._max_seconds is None else loop.call_later(self._max_seconds, expire)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not expired:
                raise
            waited = f"{self._max_seconds:g} s"
            raise Unavailable("queue", f"more than {waited} in it", f"at most {waited}; try again later") from None
        finally:
            if timer is not None:
                timer.cancel()

    async def share(self, key: Hashable, size: int, member: M, run: Callable[[list[M]], list[T]]) -> T:
        """Return what `run` makes of `member`, together with what else of this `key` is ready in the same turn.

        There is no timer: a member waits until everything that is ready has joined, and alone for nothing. `size`
        counts values of arrays; members of more than `SMALL` in all run in several groups, so that nobody holds the
        loop for long. Where a run fails, each member runs by itself and meets its own error.
        """
        group: _Group[M, T] = self._groups.get(key) or _Group()
        if group.size + size > SMALL:
            group = _Group()
        self._groups[key] = group
        number = group.joined
        group.members[number] = member
        group.joined += 1
        group.size += size
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            del group.members[number]
            raise
        finally:
            if self._groups.get(key) is group:  # the turn is over
                del self._groups[key]
        if group.answers is None:  # whoever goes on first runs them all
            group.answers = _run_all(group.members, run)
        answer = group.answers[number]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Finish what runs and take no more."""
        self._pool.shutdown()


def _run_all(members: dict[int, M], run: Callable[[list[M]], list[T]]) -> dict[int, T | Exception]:
    """Return what each member is answered with, by its number."""
    try:
        return dict(zip(members, run([*members.values()]), strict=True))
    except Exception as error:
        if len(members) == 1:
            return dict.fromkeys(members, error)
    # One of them may be at fault: it fails alone.
    answers: dict[int, T | Exception] = {}
    for number, member in members.items():
        try:
            (answers[number],) = run([member])
        except Exception as error:
            answers[number] = error
    return answers
