"""Answers health checks in the parent process while no worker serves."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import LIVE_PATHS, Dispatcher, Services
from preblock.service.api.http.origins import AllowedHosts
from preblock.service.core.errors import Invalid, Unavailable
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.server.uvicorn_bridge import Config, Server

LOG = logging.getLogger(__name__)
STOP_SECONDS = 5.0
"""Time of a thread to end; usually some milliseconds."""
MESSAGE = "no worker serves at the moment, and the service starts new ones; try again later"


class OutageServer:
    """A server on the address of the workers, which accepts connections between `begin` and `end`.

    Like a worker, it reads the settings and the TLS files at its start, and checks hosts and origins.

    Args:
        listener: the listening socket, shared with the workers.
        hosts: the hosts that requests may address.
        configure: returns the configuration of the server for an application.

    """

    def __init__(
        self, listener: socket.socket, hosts: AllowedHosts, configure: Callable[[Settings, Any], Config]
    ) -> None:
        self._listener, self._hosts, self._configure = listener, hosts, configure
        self._threads: list[_ServerThread] = []  # the last one may serve; earlier ones finish their requests
        self._reason = ""  # why the last server could not begin

    def begin(self, settings: LiveSettings) -> None:
        """Accept connections, in a thread. Log once why it cannot; a later call tries again."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if any(not thread.server.should_exit for thread in self._threads):
            return
        app = Dispatcher(OutageApp(), {}, services=Services.without_engine(settings), hosts=self._hosts)
        try:
            config = self._configure(settings.current, app)
        except Invalid as error:
            self._report(error)
            return
        server = Server(config, settings.current.header_timeout_seconds)
        try:
            listener = self._listener.dup()
        except OSError as error:  # too many open files
            self._report(error)
            return
        thread = _ServerThread(server, listener, self._report)
        try:
            thread.start()
        except RuntimeError as error:  # too many threads
            listener.close()
            self._report(error)
            return
        self._threads.append(thread)

    def end(self) -> None:
        """Accept no further connections."""
        self._reason = ""
        for thread in self._threads:
            thread.server.should_exit = True

    def stop(self) -> None:
        """End all connections, because the process ends: it would crash with a thread in an event loop."""
        self.end()
        for thread in self._threads:
            thread.stop()

    def _report(self, error: Exception) -> None:
        if str(error) != self._reason:
            LOG.error("health checks are not answered while no worker serves: %s", error)
        self._reason = str(error)


class _ServerThread(Thread):
    """The server of one outage.

    Args:
        server: to run.
        listener: to accept connections of; the thread closes it.
        report: called if the server cannot serve, such as after a change of a TLS file.

    """

    def __init__(self, server: Server, listener: socket.socket, report: Callable[[Exception], None]) -> None:
        super().__init__(name="outage", daemon=True)
        self.server, self._listener, self._report = server, listener, report
        self._cancel: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Serve until the server is to exit."""
        try:
            with self._listener, asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except (Invalid, OSError) as error:
            self._report(error)
        except asyncio.CancelledError:  # `stop`
            return

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        await self.server.serve([self._listener])

    def stop(self) -> None:
        """End the thread."""
        with suppress(RuntimeError):  # its loop is closed
            self._cancel()
        self.join(STOP_SECONDS)


class OutageApp:
    """The ASGI application: status 200 for liveness, and 503 for everything else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or a WebSocket, or run the lifespan of the server (ASGI 3)."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})  # nothing needs an end
            return
        response = Response()
        if scope["path"] not in LIVE_PATHS:
            error = Unavailable("workers", "none", "a serving worker", message=MESSAGE)
            response = errors.respond(error, scope["path"])
        await response(scope, receive, send)
