"""Coroutines run eagerly, on every supported Python."""

import asyncio
import inspect
import sys
from contextvars import copy_context

import pytest

from preblock.service.server.coroutines import run_eagerly


def test_run_eagerly_after_a_wait_resumes_in_a_task() -> None:
    async def run() -> None:
        steps, event, tasks = list[str](), asyncio.Event(), set[asyncio.Task[None]]()

        async def work() -> None:
            steps.append("begun")
            await asyncio.sleep(0)
            steps.append("turned")
            await event.wait()
            steps.append("ended")

        run_eagerly(work(), copy_context(), tasks, print)
        assert steps == ["begun"]
        assert not tasks
        await asyncio.sleep(0.01)
        assert steps == ["begun", "turned"]
        (task,) = tasks
        assert inspect.iscoroutine(task.get_coro())  # Python 3.12 and later refuse a generator
        event.set()
        await task
        assert steps == ["begun", "turned", "ended"]

    asyncio.run(run())


def test_run_eagerly_of_cancelled_task_throws_into_it() -> None:
    async def run() -> None:
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
        assert task.cancelled()
        assert ended == ["cleaned up"]

    asyncio.run(run())


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("waits", [0, 1, 2], ids=["at once", "after a turn", "in a task"])
def test_run_eagerly_reports_an_exception(waits: int) -> None:
    async def run() -> list[str]:
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
        return failures

    assert asyncio.run(run()) == ["broken"]
