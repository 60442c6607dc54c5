"""Work that is done before it is asked for, because another processor does it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")
AHEAD = 2
"""Pieces: a GPU computes one while it copies the other."""
POOL = ThreadPoolExecutor(AHEAD, thread_name_prefix="preblock-ahead")
"""The same for all answers: who is not read holds no thread."""


def ahead(run: Callable[[P], T], pieces: Iterable[P]) -> Iterator[T]:
    """Yield what `run` returns for each of `pieces`, of which the next two run in threads while one is used.

    An error is raised in the place of its piece. Who takes no more waits for nothing, and lets nothing else begin.
    """
    running: deque[Future[T]] = deque()
    try:
        for piece in pieces:
            running.append(POOL.submit(run, piece))
            if len(running) > AHEAD:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
