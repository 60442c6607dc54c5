"""Background tasks: they survive every failure, and end with the process."""

import asyncio
import logging

import pytest

from preblock.service.core.tasks import start_task


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [ValueError("broken"), Panic("broken"), asyncio.CancelledError("broken")])
def test_start_task_restarts_failed_work(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        failures, running = iter([error, error]), asyncio.Event()

        async def work() -> None:
            for failure in failures:
                raise failure
            running.set()
            await asyncio.Event().wait()

        task = start_task(work, pause=0.001)
        await asyncio.wait_for(running.wait(), 5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.message for record in caplog.records] == ["background work failed; it starts again in 0.001 s"] * 2


def test_exit_in_background_work_ends_the_process() -> None:
    async def run() -> None:
        async def work() -> None:
            raise SystemExit(3)

        task = start_task(work)
        await asyncio.wait([task])

    with pytest.raises(SystemExit) as ended:
        asyncio.run(run())
    assert ended.value.code == 3
