"""Threads that the end of the process does not wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

ResultT = TypeVar("ResultT")


def start_thread(work: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Run `work` in a daemon thread `name`, and return its future. Threads of an executor would hold up the end."""
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()  # a waiting task that is cancelled leaves the thread alone

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future
