"""Coroutines that run at once in the caller, in the event loop but without a task."""

import asyncio
import logging
from collections.abc import Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any

LOG = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]


def run_eagerly(work: Work, context: Context, tasks: set[asyncio.Task[None]]) -> None:
    """Run `work` in `context` until it ends or awaits something; then it goes on by itself.

    A turn of the event loop (`asyncio.sleep(0)`) takes no task: a task costs as much as a small answer. Any other await
    takes one, and `tasks` holds it until it ends.
    """
    try:
        awaited = context.run(work.send, None)
    except StopIteration:
        return
    except Exception:
        LOG.exception("what runs without a task failed in an unforeseen way")
        return
    if awaited is None:
        asyncio.get_running_loop().call_soon(run_eagerly, work, context, tasks)
        return
    task = asyncio.get_running_loop().create_task(_rest(work, awaited), context=context)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@coroutine
def _rest(work: Work, awaited: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that awaits `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a task is cancelled so
                awaited = work.throw(error)
            else:
                awaited = work.send(value)
    except StopIteration:
        return
