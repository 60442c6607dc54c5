"""Decides when and where work runs: small pieces at once in the event loop, large ones in a bounded pool."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from incipit.service.errors import Unavailable

T = TypeVar("T")

SMALL = 2**19
"""Values of an array, and bytes that are only copied, that are handled in a few tenths of a millisecond."""
TEXT_COST = 32
"""A byte of JSON that is read, or a number that is written as text, takes as long as this many values."""
TOKENIZER_COST = 2**11
"""A character of text that becomes token ids takes as long as this many values."""


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

    async def run(self, size: int, work: Callable[[], T], text: bool = False) -> T:
        """Return what `work` returns; a `size` of at most `SMALL` is not worth a thread.

        `size` counts values of arrays or bytes; with `text`, bytes of JSON or numbers that become text.

        Raises:
            Unavailable: too many pieces wait already.

        """
        if size * (TEXT_COST if text else 1) <= SMALL:
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
