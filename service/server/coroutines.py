"""Runs a coroutine eagerly: in the caller, without a task until it has to wait.

Python 3.12 has `asyncio.eager_task_factory`; the service also supports Python 3.11.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any

from preblock.service.core.errors import ENDS

Work = Coroutine[Any, Any, None]


def run_eagerly(work: Work, context: Context, tasks: set[asyncio.Task[None]], fail: Callable[[], None]) -> None:
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
    task = asyncio.get_running_loop().create_task(_rest(work, awaited, fail), context=context)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _rest(work: Work, awaited: Any, fail: Callable[[], None]) -> None:
    """Resume a coroutine suspended on `awaited`. Since Python 3.12 a task takes no generator, so this is none."""
    try:
        await _resume(work, awaited)
    except ENDS:
        raise
    except BaseException:
        fail()


@coroutine
def _resume(work: Work, awaited: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a cancelled task throws
                awaited = None  # the future of the error would keep this frame, and so everything in `work`, alive
                awaited = work.throw(error)
            else:
                awaited = work.send(value)
    except StopIteration:
        return
