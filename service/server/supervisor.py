"""The supervisor of worker processes on one listening socket: it starts, checks, replaces and stops them."""

import asyncio
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
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ensure_running
from threading import Thread
from types import FrameType

from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.server.outage import OutageServer
from preblock.service.server.uvicorn_bridge import STARTUP_FAILURE

LOG = logging.getLogger(__name__)
FORKSERVER = multiprocessing.get_context("forkserver")
CHECK_INTERVAL_SECONDS = 0.5
HEALTH_TIMEOUT_SECONDS = 60
"""A worker is replaced if its event loop does not answer a check in this time. Long computations run in threads."""
STABLE_SECONDS = 1.0
"""A worker that ends before it has served so long has failed, and delays the next start."""
OUTAGE_SECONDS = 5.0
"""Time without a serving worker until the parent answers; until then connections wait for the next worker."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Times until the next start after failed workers: each is twice the one before."""
END_SECONDS = 10
"""Time of a worker after its requests, to send the last spans and end."""
MAX_WAIT_SECONDS = 2**31 // 1000 - 1
"""Longest time that poll(2) can wait, 24 days."""
MAX_SOCKET_FOLDER_BYTES = 75
"""The address of a Unix socket has at most 108 bytes (unix(7)), its file name included."""
SHORT_FOLDER = "/tmp"
ALIVE, SERVING = b"alive", b"serving"
"""Messages of a worker. A text is the reason of its failure."""
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


class ParentPipe:
    """The end of a worker's pipe to its parent, in the worker.

    Args:
        pipe: to the parent.

    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._loop: asyncio.AbstractEventLoop | None = None

    def report_serving(self) -> None:
        """Report that this worker serves. From now on the running event loop answers the checks."""
        self._loop = asyncio.get_running_loop()
        self._send(SERVING)

    def report_failure(self, reason: str) -> None:
        """Report the reason why this worker ends."""
        self._send(reason)

    def answer_checks(self) -> None:
        """Answer checks until the parent is gone or replaces this worker, then stop: an orphan would keep the port.

        Before it serves, the worker has no request to finish, and models take minutes to open: it ends at once.
        """
        with suppress(EOFError, OSError):
            while True:
                self._pipe.recv()
                try:
                    if self._loop is None:  # the models are being opened, which may take minutes
                        self._send(ALIVE)
                    else:
                        self._loop.call_soon_threadsafe(self._send, ALIVE)
                except RuntimeError:  # the loop is closed, because the process ends
                    self._send(ALIVE)
        os.kill(os.getpid(), signal.SIGKILL if self._loop is None else signal.SIGTERM)

    def _send(self, message: bytes | str) -> None:
        with suppress(OSError):  # the parent is gone
            self._pipe.send(message)


class Worker:
    """A serving process, and the parent's pipe for its checks.

    Args:
        serve: runs in the process, until SIGTERM.
        timeout_seconds: longest time of a check; default `HEALTH_TIMEOUT_SECONDS`.

    Attributes:
        process: the process.
        pipe: to the process.
        started: time of the start.
        serving_since: time at which it began to serve; None before.
        failure: the reported reason of its end; empty without one.

    Raises:
        OSError, EOFError: no process can be started.

    """

    def __init__(self, serve: Callable[[ParentPipe], None], timeout_seconds: float = HEALTH_TIMEOUT_SECONDS) -> None:
        self.pipe, remote = FORKSERVER.Pipe()
        self._timeout_seconds = timeout_seconds
        self.started = time.monotonic()
        self.serving_since: float | None = None
        self.failure = ""
        self._asked: float | None = None
        """Time of the check without an answer yet."""
        self._next_check = 0.0
        self.process = FORKSERVER.Process(target=run_worker, args=(serve, remote))
        with remote:  # closed at the end, or a check would wait for a worker after its end
            try:
                self.process.start()
            except BaseException:
                self.pipe.close()
                raise

    def is_healthy(self) -> bool:
        """Return whether the process is alive and has answered the last check in time, without waiting for it."""
        now = time.monotonic()
        try:
            while self.pipe.poll():
                self._read(self.pipe.recv(), now)
            if self._asked is None and now >= self._next_check:
                self.pipe.send(b"ping")
                self._asked, self._next_check = now, now + CHECK_INTERVAL_SECONDS
        except (OSError, EOFError):
            return False
        if self._asked is not None and now - self._asked >= self._timeout_seconds:
            self.failure = f"it has not answered a check for {self._timeout_seconds:g} s"
        return self.process.is_alive() and not self.failure

    def _read(self, message: bytes | str, now: float) -> None:
        if isinstance(message, str):
            self.failure = message
        elif message == SERVING:
            self.serving_since = now
        else:
            self._asked = None

    def has_failed(self) -> bool:
        """Return whether the process has served for so short a time that the next one may fail, too."""
        return self.serving_since is None or time.monotonic() - self.serving_since < STABLE_SECONDS

    def stop(self) -> None:
        """Let the process finish its requests and end."""
        # Not a signal: a process that has just been forked still ignores SIGTERM, like the forkserver.
        self.pipe.close()

    def kill(self) -> int | None:
        """End the process now, and return its exit code."""
        self.process.kill()
        self.pipe.close()  # the process then ends itself, even without the forkserver
        self.process.join()
        return self.process.exitcode


def run_worker(serve: Callable[[ParentPipe], None], pipe: Connection) -> None:
    """Serve in this process, and answer the checks of the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the forkserver ignores it
    parent = ParentPipe(pipe)
    Thread(target=parent.answer_checks, daemon=True).start()
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after a SIGINT
        serve(parent)


class Supervisor:
    """Keeps the configured number of workers running until SIGTERM or SIGINT. A second signal kills them.

    Workers reload files by themselves, so SIGHUP changes nothing.

    Args:
        settings: of the service; the settings file is read again for each later worker.
        serve: runs in each worker.
        open_address: called when the first worker serves, to accept connections.
        outage: answers health checks while no worker serves.

    """

    def __init__(
        self,
        settings: Settings,
        serve: Callable[[Settings, ParentPipe], None],
        open_address: Callable[[], None],
        outage: OutageServer,
    ) -> None:
        self.killed_by = 0
        self._settings = LiveSettings(settings, log_changes=True)
        self._serve, self._outage = serve, outage
        self._open_address: Callable[[], None] | None = open_address  # None after its call, to release the models
        self._workers: list[Worker] = []
        self._stopping = False
        self._error: PreblockError | None = None
        self._pause = self._failed = 0.0  # pause after the last failure, and its time
        self._reason = ""  # of the last failure
        self._served = 0.0  # last time at which a worker served
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for number in IGNORED:
            signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by the workers

    def _stop(self, number: int, _: FrameType | None) -> None:
        if not self._workers and self._open_address is not None:  # the forkserver is still starting
            sys.exit()
        if self._stopping:
            self.killed_by = number
            for worker in self._workers:
                worker.process.kill()
        self._stopping = True

    def run(self) -> None:
        """Start and replace workers until a signal; return when all have ended, or were killed for not ending.

        Raises:
            PreblockError: of `open_address`.

        """
        while not self._stopping:
            self._settings.reload()
            self._remove_ended()
            self._update_address()
            self._start_missing()
            wait([worker.pipe for worker in self._workers], CHECK_INTERVAL_SECONDS)
        self._outage.stop()
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

    def _remove_ended(self) -> None:
        """Remove workers that have ended or do not answer."""
        for worker in tuple(self._workers):
            if self._stopping or worker.is_healthy():
                continue
            exit_code = worker.kill()
            self._workers.remove(worker)
            if exit_code == STARTUP_FAILURE:  # of the server, not of a model: each worker would fail
                LOG.error("a worker cannot serve; the service stops")
                self._stopping = True
            elif not worker.has_failed():
                reason = worker.failure or f"exit code {exit_code}"
                LOG.warning("worker %s has ended: %s; a new worker replaces it", worker.process.pid, reason)
            else:
                self._delay_start(worker.started, worker.failure or f"exit code {exit_code}")

    def _delay_start(self, started: float, reason: str) -> None:
        """Start the next worker after a pause, because the one of the time `started` has failed.

        Workers that fail together lengthen the pause once. The same reason is logged once.
        """
        if started >= self._failed:
            self._pause = min(max(2 * self._pause, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
        self._failed = time.monotonic()
        if reason != self._reason:
            LOG.error("a worker has failed: %s; others start after pauses of up to %g s", reason, MAX_PAUSE_SECONDS)
        self._reason = reason

    def _update_address(self) -> None:
        """Accept connections from the first serving worker on; later, answer health checks while no worker serves."""
        now = time.monotonic()
        serving = [worker for worker in self._workers if worker.serving_since is not None]
        if self._pause and any(worker.started > self._failed and not worker.has_failed() for worker in serving):
            LOG.info("workers serve again")
            self._pause, self._reason = 0.0, ""
        if serving:
            self._served = now
        if serving and self._open_address is not None:
            try:
                self._open_address()
            except PreblockError as error:
                self._error, self._stopping = error, True
            self._open_address = None
        if self._open_address is None and now - self._served > OUTAGE_SECONDS and not self._stopping:
            self._outage.begin(self._settings)
        else:
            self._outage.end()

    def _start_missing(self) -> None:
        """Start the missing workers; after a failure one at a time, each after a pause."""
        while len(self._workers) < self._settings.current.workers and not self._stopping:
            is_starting = any(worker.serving_since is None for worker in self._workers)
            if self._pause and (is_starting or time.monotonic() < self._failed + self._pause):
                return
            try:
                self._workers.append(Worker(partial(self._serve, self._settings.current)))
            except (OSError, EOFError) as error:  # such as too many processes
                self._delay_start(time.monotonic(), str(error))
