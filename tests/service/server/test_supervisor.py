"""Worker processes and their parent."""

import asyncio
import signal
import time
from contextlib import ExitStack

from preblock.service.server.supervisor import ParentPipe, Worker, start_forkserver
from preblock.service.server.uvicorn_bridge import Config, Server
from tests.support.waiting import wait_until

SECONDS = 60
TIMEOUTS = (1, 2, 4, 8, 16)
"""Seconds. On a busy machine the answers of all may be later than the shorter ones, which proves nothing."""


def sleep(_: ParentPipe) -> None:
    """Block the main thread during the start, as opening a large model does."""
    time.sleep(2 * SECONDS)


def open_models(parent: ParentPipe) -> None:
    """Report the start, and open models for minutes, as a factory does in the server."""

    def create() -> None:
        parent.report_failure("it opens models")
        time.sleep(2 * SECONDS)

    Server(Config(create, factory=True), 1).run(sockets=[])


def run_event_loop(parent: ParentPipe) -> None:
    async def serve() -> None:
        parent.report_serving()
        await asyncio.sleep(2 * SECONDS)

    asyncio.run(serve())


def block_event_loop(parent: ParentPipe) -> None:
    async def serve() -> None:
        parent.report_serving()
        time.sleep(2 * SECONDS)

    asyncio.run(serve())


def test_worker_stopped_while_it_opens_models_terminates() -> None:
    """The server has its handler of SIGTERM by then, which would wait for the models."""
    start_forkserver(["preblock.service.server.preload"])
    worker = Worker(open_models)
    wait_until(lambda: not worker.is_healthy())
    assert worker.failure == "it opens models"
    worker.stop()
    worker.process.join(10)
    assert worker.process.exitcode == -signal.SIGKILL


def only_blocked_worker_is_unhealthy(timeout: float) -> bool:
    """Check a worker that starts, one whose event loop runs, and one whose event loop is blocked."""
    with ExitStack() as stack:
        starting, running, blocked = (Worker(serve, timeout) for serve in (sleep, run_event_loop, block_event_loop))
        for worker in (starting, running, blocked):
            stack.callback(worker.kill)
        wait_until(lambda: not running.is_healthy() or running.serving_since is not None)
        wait_until(lambda: not blocked.is_healthy())
        assert blocked.failure == f"it has not answered a check for {timeout} s"
        end = time.monotonic() + 2 * timeout
        while starting.is_healthy() and running.is_healthy() and time.monotonic() < end:
            time.sleep(0.05)
        assert starting.serving_since is None
        return not starting.failure and not running.failure and blocked.serving_since is not None


def test_only_blocked_event_loop_makes_worker_unhealthy() -> None:
    start_forkserver(["preblock.service.server.preload"])
    assert any(map(only_blocked_worker_is_unhealthy, TIMEOUTS))
