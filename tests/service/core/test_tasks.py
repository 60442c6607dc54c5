"""Background tasks survive every failure, and end with the process; coroutines run eagerly, on every Python."""

import asyncio
import gc
import inspect
import logging
import sys
import weakref
from contextlib import suppress
from contextvars import copy_context
from io import BytesIO

import pytest

from preblock.service.core.tasks import run_eagerly, start_task, start_thread
from tests.support.loops import in_loop
from tests.support.waiting import wait_until


class Panic(BaseException):
    """As a library in Rust raises it."""


@in_loop
async def test_start_task_restarts_failed_work(caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([ValueError("broken"), Panic("broken"), asyncio.CancelledError("broken")])
    running = asyncio.Event()

    async def work() -> None:
        for failure in failures:
            raise failure
        running.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = start_task(work, pause=0.001)
        await asyncio.wait_for(running.wait(), 5)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert [record.message for record in caplog.records] == ["background work failed; it starts again in 0.001 s"] * 3


def test_exit_in_background_work_ends_the_process() -> None:
    async def run() -> None:
        async def work() -> None:
            raise SystemExit(3)

        task = start_task(work)
        await asyncio.wait([task])

    with pytest.raises(SystemExit) as ended:
        asyncio.run(run())
    assert ended.value.code == 3


@in_loop
async def test_run_eagerly_after_a_wait_resumes_in_a_task() -> None:
    steps, event, tasks = list[str](), asyncio.Event(), set[asyncio.Task[None]]()

    async def work() -> None:
        steps.append("begun")
        await asyncio.sleep(0)
        steps.append("turned")
        await event.wait()
        steps.append("ended")

    run_eagerly(work(), copy_context(), tasks, print)
    assert (steps, tasks) == (["begun"], set())
    await asyncio.sleep(0.01)
    assert steps == ["begun", "turned"]
    (task,) = tasks
    assert inspect.iscoroutine(task.get_coro())  # Python 3.12 and later refuse a generator
    event.set()
    await task
    assert steps == ["begun", "turned", "ended"]


@in_loop
async def test_run_eagerly_of_cancelled_task_throws_into_it() -> None:
    tasks, ended = set[asyncio.Task[None]](), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    run_eagerly(work(), copy_context(), tasks, print)
    (task,) = tasks
    await asyncio.sleep(0)  # the task begins to wait
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), ended) == (True, ["cleaned up"])


@pytest.mark.parametrize("waits", [0, 1, 2], ids=["at once", "after a turn", "in a task"])
@in_loop
async def test_run_eagerly_reports_an_exception(waits: int) -> None:
    failures, event = list[str](), asyncio.Event()

    async def work() -> None:
        if waits == 1:
            await asyncio.sleep(0)
        elif waits == 2:
            await event.wait()
        raise Panic("broken")

    run_eagerly(work(), copy_context(), set(), lambda: failures.append(str(sys.exc_info()[1])))
    event.set()
    await asyncio.sleep(0.01)
    assert failures == ["broken"]


def test_failed_thread_keeps_nothing_of_its_work() -> None:
    kept: list[weakref.ref[BytesIO]] = []

    def fail() -> None:
        opened = BytesIO()
        kept.append(weakref.ref(opened))
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            start_thread(fail, "fail").result(10)
        wait_until(lambda: kept[0]() is None, 5)
    finally:
        gc.enable()
