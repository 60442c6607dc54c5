"""Work beside its caller: background tasks, threads that the end of the process does not wait for, and coroutines.

Python 3.12 has `asyncio.eager_task_factory`; the service also supports Python 3.11.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextvars import Context
from threading import Thread
from types import coroutine
from typing import Any, TypeVar

from preblock.service.core.errors import ENDS

LOG = logging.getLogger(__name__)
RESTART_SECONDS = 2.0
"""Pause before failed background work starts again."""

Work = Callable[[], Coroutine[Any, Any, None]]
EagerWork = Coroutine[Any, Any, None]


def start_task(work: Work, pause: float = RESTART_SECONDS) -> asyncio.Task[None]:
    """Start background work, which the caller keeps and cancels.

    `SystemExit` and `KeyboardInterrupt` end the process, and any other exception starts the work again after `pause`
    seconds: also a panic of a library in Rust, and a cancellation that does not come from the caller.
    """
    return asyncio.create_task(_keep_running(work, pause))


async def _keep_running(work: Work, pause: float) -> None:
    task = asyncio.current_task()
    while True:
        try:
            await work()
            return
        except (SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            if task is not None and task.cancelling():
                raise
            LOG.exception("background work failed; it starts again in %g s", pause)
        await asyncio.sleep(pause)


ResultT = TypeVar("ResultT")


def start_thread(work: Callable[[], ResultT], name: str) -> Future[ResultT]:
    """Run `work` in a daemon thread `name`, and return its future. Threads of an executor would hold up the end."""
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()  # a waiting task that is cancelled leaves the thread alone

    def run(future: Future[ResultT]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future  # it holds the error, and the error this frame: such a cycle would keep opened graphs

    Thread(target=run, args=(future,), name=name, daemon=True).start()
    return future


def run_eagerly(work: EagerWork, context: Context, tasks: set[asyncio.Task[None]], fail: Callable[[], None]) -> None:
    """Run `work` in `context` up to its first await, and resume it later from the event loop.

    `asyncio.sleep(0)` creates no task, because a task costs as much as a small response. Any other await creates one;
    `tasks` holds it until it ends. `fail` handles an unexpected exception, as the one in progress.
    """
    try:
        awaited = context.run(work.send, None)
    except StopIteration:
        return
    except ENDS:
        raise
    except BaseException:
        context.run(fail)
        return
    if awaited is None:
        asyncio.get_running_loop().call_soon(run_eagerly, work, context, tasks, fail)
        return
    task = asyncio.get_running_loop().create_task(_rest(_resume(work, awaited), fail), context=context)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _rest(resumed: Awaitable[None], fail: Callable[[], None]) -> None:
    """Await the rest of a coroutine. Since Python 3.12 a task takes no generator, as `_resume` is."""
    try:
        await resumed
    except ENDS:
        raise
    except BaseException:
        fail()


@coroutine
def _resume(work: EagerWork, awaited: Any) -> Generator[Any, Any, None]:
    """Resume a coroutine suspended on `awaited`.

    During a throw no frame of the task may hold `awaited`: the future holds its error, and the error the frames, and so
    everything in `work`.
    """
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a cancelled task throws
                awaited = None
                awaited = work.throw(error)
            else:
                awaited = work.send(value)
    except StopIteration:
        return
