"""Decides when and where work runs: small pieces at once in the event loop, large ones in a bounded pool."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from incipit.service.errors import Unavailable

T = TypeVar("T")

SMALL = 2**19
"""Values (numbers of an array, bytes of a body) that are handled in a few tenths of a millisecond."""


class Scheduler:
    """Runs work for the event loop.

    Args:
        threads: of the pool; sessions and encoders release the interpreter while they work.
        max_waiting: pieces that may wait for a thread; one more is refused.

    """

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="incipit")
        self._limit = threads + max_waiting
        self._max_waiting = max_waiting
        self._pending = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns; at most `SMALL` values of `size` are not worth a thread.

        Raises:
            Unavailable: too many pieces wait already.

        """
        if size <= SMALL:
            return work()
        if self._pending >= self._limit:
            waiting = f"{self._max_waiting} waiting"
            raise Unavailable("queue", f"a request more than {waiting}", f"at most {waiting}; try again later")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Finish what runs and take no more."""
        self._pool.shutdown()
