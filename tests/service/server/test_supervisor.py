"""Worker processes and their parent."""

import asyncio
import signal
import time

from preblock.service.server.supervisor import ParentPipe, Worker, start_forkserver
from preblock.service.server.uvicorn_adapter import Config, Server
from tests.support.waiting import wait_until

SECONDS = 60
TIMEOUT_SECONDS = 1.0


def sleep(_: ParentPipe) -> None:
    """Block the main thread during the start, as opening a large model does."""
    time.sleep(2 * SECONDS)


def open_models(parent: ParentPipe) -> None:
    """Report the start, and open models for minutes, as a factory does in the server."""

    def create() -> None:
        parent.report_failure("it opens models")
        time.sleep(2 * SECONDS)

    Server(Config(create, factory=True), 1).run(sockets=[])


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
        assert worker.process.exitcode == -signal.SIGKILL


def test_worker_stopped_while_it_opens_models_terminates() -> None:
    """The server has its handler of SIGTERM by then, which would wait for the models."""
    start_forkserver(["preblock.service.server.preload"])
    worker = Worker(open_models)
    wait_until(lambda: not worker.is_healthy())
    assert worker.failure == "it opens models"
    worker.stop()
    worker.process.join(10)
    assert worker.process.exitcode == -signal.SIGKILL


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
