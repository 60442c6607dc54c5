"""The supervisor of worker processes on one listening socket: it starts, checks, replaces and stops them."""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from threading import Thread
from types import FrameType

from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.server.uvicorn_adapter import STARTUP_FAILURE

LOG = logging.getLogger(__name__)
FORKSERVER = multiprocessing.get_context("forkserver")
CHECK_INTERVAL_SECONDS = 0.5
HEALTH_TIMEOUT_SECONDS = 30
"""A worker is replaced if it does not answer a check in this time, which includes its start on a busy machine."""
END_SECONDS = 10
"""Time of a worker after its requests, to send the last spans and end."""
MAX_WAIT_SECONDS = 2**31 // 1000 - 1
"""Longest time that poll(2) can wait, 24 days."""
MAX_SOCKET_FOLDER_BYTES = 75
"""The address of a Unix socket has at most 108 bytes (unix(7)), its file name included."""
SHORT_FOLDER = "/tmp"
IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1, signal.SIGUSR2)


def start_forkserver(preloaded: Sequence[str]) -> None:
    """Start the forkserver, from which workers are forked. Workers share the memory pages of its modules.

    Raises:
        Invalid: no folder for its socket can be used.

    """
    FORKSERVER.set_forkserver_preload(list(preloaded))
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # telemetry starts a thread and opens a file during the import
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER_BYTES:
        tempfile.tempdir = SHORT_FOLDER
    # The parent handles Ctrl-C, and stops the workers. This process inherits it for its imports.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ensure_running()
    except OSError as error:
        found = tempfile.gettempdir()
        text = f"TMPDIR: no socket for the workers can be made in {found}: {error}"
        raise Invalid("TMPDIR", found, "a writable folder for sockets", message=text) from error
    finally:
        signal.signal(signal.SIGINT, interrupt)
        tempfile.tempdir = folder


class Worker:
    """A serving process, and the parent's pipe for its checks.

    Args:
        serve: runs in the process, until SIGTERM.

    Raises:
        OSError, EOFError: no process can be started.

    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self._pipe, remote = FORKSERVER.Pipe()
        self._asked: float | None = None
        """Time of the check without an answer yet."""
        self.process = FORKSERVER.Process(target=run_worker, args=(serve, remote))
        with remote:  # closed at the end, or a check would wait for a worker after its end
            try:
                self.process.start()
            except BaseException:
                self._pipe.close()
                raise

    def is_healthy(self) -> bool:
        """Return whether the process is alive and has answered the last check in time, without waiting for it."""
        if not self.process.is_alive():
            return False
        try:
            if self._asked is None:
                self._pipe.send(b"ping")
                self._asked = time.monotonic()
            elif self._pipe.poll():
                self._pipe.recv()
                self._asked = None
        except (OSError, EOFError):
            return False
        return self._asked is None or time.monotonic() - self._asked < HEALTH_TIMEOUT_SECONDS

    def stop(self) -> None:
        """Let the process finish its requests and end."""
        # Not a signal: a process that has just been forked still ignores SIGTERM, like the forkserver.
        self._pipe.close()

    def kill(self) -> int | None:
        """End the process now, and return its exit code."""
        self.process.kill()
        self._pipe.close()  # the process then ends itself, even without the forkserver
        self.process.join()
        return self.process.exitcode


def run_worker(serve: Callable[[], None], pipe: Connection) -> None:
    """Serve in this process, and answer the checks of the parent from a thread."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the forkserver ignores it
    Thread(target=_answer_checks, args=(pipe,), daemon=True).start()
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after a SIGINT
        serve()


def _answer_checks(pipe: Connection) -> None:
    """Answer checks until the parent is gone or replaces this worker, then stop: an orphan would keep the port."""
    with suppress(EOFError, OSError):
        while True:
            pipe.send(pipe.recv())
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Keeps the configured number of workers running until SIGTERM or SIGINT. A second signal kills them.

    Workers reload files by themselves, so SIGHUP changes nothing.

    Args:
        settings: of the service; the settings file is read again for each later worker.
        serve: runs in each worker.

    """

    def __init__(self, settings: Settings, serve: Callable[[Settings], None]) -> None:
        self.killed_by = 0
        self._settings = LiveSettings(settings, log_changes=True)
        self._serve = serve
        self._workers: list[Worker] = []
        self._stopping = False
        self._error: PreblockError | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for number in IGNORED:
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the workers

    def fail(self, error: PreblockError) -> None:
        """Stop from another thread; `run` raises the error when all workers have ended."""
        self._error, self._stopping = error, True

    def _stop(self, number: int, _: FrameType | None) -> None:
        if not self._workers:  # the forkserver is still starting
            sys.exit()
        if self._stopping:
            self.killed_by = number
            for worker in self._workers:
                worker.process.kill()
        self._stopping = True

    def run(self) -> None:
        """Start and replace workers until a signal; return when all have ended, or were killed for not ending.

        Raises:
            PreblockError: of `fail`.

        """
        while not self._stopping:
            self._settings.reload()
            self._replace_unhealthy()
            self._start_missing()
            time.sleep(CHECK_INTERVAL_SECONDS)
        LOG.info("stopping: %d workers finish their requests", len(self._workers))
        for worker in self._workers:
            worker.stop()
        # HTTP and gRPC requests have this time one after the other.
        deadline = time.monotonic() + 2 * self._settings.current.shutdown_timeout_seconds + END_SECONDS
        for worker in self._workers:
            worker.process.join(min(max(0.0, deadline - time.monotonic()), MAX_WAIT_SECONDS))
            if worker.process.is_alive():
                LOG.error("worker %s does not end, and is killed", worker.process.pid)
                worker.kill()
        if self._error is not None:
            raise self._error

    def _replace_unhealthy(self) -> None:
        for worker in tuple(self._workers):
            if self._stopping or worker.is_healthy():
                continue
            exit_code = worker.kill()
            self._workers.remove(worker)
            if exit_code == STARTUP_FAILURE:  # of the server, not of a model: each worker would fail
                LOG.error("a worker cannot serve; the service stops")
                self._stopping = True
            else:
                LOG.warning(
                    "worker %s has ended with exit code %s; a new worker replaces it", worker.process.pid, exit_code
                )
                self._start_missing()

    def _start_missing(self) -> None:
        while len(self._workers) < self._settings.current.workers and not self._stopping:
            try:
                self._workers.append(Worker(partial(self._serve, self._settings.current)))
            except (OSError, EOFError) as error:  # such as too many processes
                LOG.error("a worker cannot be started; another attempt follows: %s", error)
                break
