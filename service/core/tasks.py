"""Background tasks of a process: each failure is logged, and the work starts again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

LOG = logging.getLogger(__name__)
RESTART_SECONDS = 2.0
"""Pause before failed background work starts again."""

Work = Callable[[], Coroutine[Any, Any, None]]


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
