"""An error leaves no reference cycle, which would keep its request, or a region of shared memory, until a collection.

Oracle: the garbage collector of Python.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial

import pytest

from preblock.service.core.errors import PreblockError
from preblock.service.core.tasks import run_eagerly
from preblock.service.engine.admission import Limits
from preblock.service.engine.plain_calls import check_size
from preblock.service.engine.scheduler import Scheduler
from preblock.service.runtime.cuda_driver import DriverError
from preblock.service.runtime.cuda_embedding import _named_errors
from tests.service.engine.test_output_memory import open_range
from tests.support.engines import live_settings

SETTINGS = live_settings(rate_limit_per_second=0.001)
LIMITS = Limits(SETTINGS)
LIMITS.enter()


def meet_driver_error() -> None:
    with _named_errors():
        raise DriverError(2, "CUDA_ERROR_OUT_OF_MEMORY")


def meet_full_memory() -> None:
    with open_range(64).name_errors("written"):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "fail",
    [
        LIMITS.enter,
        partial(check_size, SETTINGS.requests, "input_ids", tokens=2**40),
        meet_driver_error,
        meet_full_memory,
    ],
    ids=["rate", "size", "driver", "memory"],
)
def test_error_leaves_no_cycle(fail: Callable[[], None]) -> None:
    gc.collect()
    with pytest.raises(PreblockError):
        fail()
    assert gc.collect() == 0


async def fail_in_batch() -> None:
    def divide(items: list[int]) -> list[float]:
        return [1 / item for item in items]

    scheduler = Scheduler(1, SETTINGS)
    await asyncio.gather(*(scheduler.run_batched("a", 1, item, divide) for item in (1, 0)), return_exceptions=True)
    scheduler.close()


async def fail_in_waited_future() -> None:
    waiting, tasks = list[asyncio.Future[None]](), set[asyncio.Task[None]]()

    def wait() -> asyncio.Future[None]:
        waiting.append(asyncio.get_running_loop().create_future())
        return waiting[0]

    async def work() -> None:
        with suppress(ZeroDivisionError):
            await wait()

    run_eagerly(work(), copy_context(), tasks, print)
    await asyncio.sleep(0)  # the task begins to wait
    waiting.pop().set_exception(ZeroDivisionError())
    await asyncio.wait(tasks)


@pytest.mark.parametrize("fail", [fail_in_batch, fail_in_waited_future])
def test_error_in_the_event_loop_leaves_no_cycle(fail: Callable[[], Awaitable[None]]) -> None:
    async def scenario() -> None:
        gc.collect()
        await fail()
        await asyncio.sleep(0)  # the loop forgets the ended tasks
        assert gc.collect() == 0

    asyncio.run(scenario())
