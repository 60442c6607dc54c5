"""Worker processes and their parent."""

import asyncio
import signal
import time

from preblock.service.server.supervisor import ParentPipe, Worker, start_forkserver
from tests.support.waiting import wait_until

SECONDS = 60
TIMEOUT_SECONDS = 1.0


def sleep(_: ParentPipe) -> None:
    """Block the main thread during the start, as opening a large model does."""
    time.sleep(2 * SECONDS)


def block_event_loop(parent: ParentPipe) -> None:
    async def serve() -> None:
        parent.report_serving()
        await asyncio.sleep(2 * TIMEOUT_SECONDS)
        time.sleep(2 * SECONDS)

    asyncio.run(serve())


def test_worker_stopped_during_start_terminates() -> None:
    start_forkserver(["preblock.service.server.preload"])  # it ignores SIGTERM
    for pause in (0, 0.001, 0.01):
        worker = Worker(sleep)
        time.sleep(pause)
        worker.stop()
        worker.process.join(SECONDS)
        assert worker.process.exitcode == -signal.SIGTERM


def test_blocked_event_loop_makes_worker_unhealthy() -> None:
    start_forkserver(["preblock.service.server.preload"])
    worker = Worker(block_event_loop, TIMEOUT_SECONDS)
    try:
        wait_until(lambda: worker.is_healthy() and worker.serving_since is not None)
        since = worker.serving_since or 0.0
        wait_until(lambda: not worker.is_healthy())
        assert time.monotonic() - since > 2 * TIMEOUT_SECONDS
        assert worker.failure == "it has not answered a check for 1 s"
    finally:
        worker.kill()


def test_long_start_leaves_worker_healthy() -> None:
    start_forkserver(["preblock.service.server.preload"])
    worker = Worker(sleep, TIMEOUT_SECONDS)
    try:
        began = time.monotonic()
        while time.monotonic() - began < 3 * TIMEOUT_SECONDS:
            assert worker.is_healthy()
            time.sleep(0.05)
        assert worker.serving_since is None
    finally:
        worker.kill()
