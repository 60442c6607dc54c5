"""Worker processes and their parent."""

import signal
import time
from functools import partial

from preblock.service.server.supervisor import Worker, start_forkserver

SECONDS = 60


def test_worker_stopped_during_start_terminates() -> None:
    start_forkserver(["preblock.service.server.preload"])  # it ignores SIGTERM
    for pause in (0, 0.001, 0.01):
        worker = Worker(partial(time.sleep, 2 * SECONDS))
        time.sleep(pause)
        worker.stop()
        worker.process.join(SECONDS)
        assert worker.process.exitcode == -signal.SIGTERM
