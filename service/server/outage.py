"""Answers health checks in the parent process while no worker serves."""

import logging
import socket
from collections.abc import Callable
from threading import Thread
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.origins import AllowedHosts
from preblock.service.core.errors import Invalid, Unavailable
from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.server.uvicorn_adapter import Config, Server

LOG = logging.getLogger(__name__)
LIVE_PATHS = frozenset({"/livez", "/v2/health/live"})
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
        self._server: Server | None = None
        self._reason = ""  # why the last call of `begin` failed

    def begin(self, settings: LiveSettings) -> None:
        """Accept connections, in a thread. With invalid TLS files, log it once; a later call tries again."""
        if self._server is not None:
            return
        app = Dispatcher(OutageApp(settings), {}, settings=settings, hosts=self._hosts)
        try:
            config = self._configure(settings.current, app)
        except Invalid as error:
            if str(error) != self._reason:
                LOG.error("health checks are not answered while no worker serves: %s", error)
            self._reason = str(error)
            return
        self._reason = ""
        self._server = Server(config, settings.current.header_timeout_seconds)
        # The server closes its socket at its end.
        Thread(target=self._server.run, args=([self._listener.dup()],), daemon=True).start()

    def end(self) -> None:
        """Accept no further connections."""
        if self._server is not None:
            self._server.should_exit = True
            self._server = None


class OutageApp:
    """The ASGI application: status 200 for liveness, and 503 for everything else.

    Args:
        settings: of the service.

    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or a WebSocket, or run the lifespan of the server (ASGI 3)."""
        if scope["type"] == "lifespan":
            scope["state"]["settings"] = self._settings
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        response = Response()
        if scope["path"] not in LIVE_PATHS:
            error = Unavailable("workers", "none", "a serving worker", message=MESSAGE)
            response = errors.respond(error, scope["path"])
        await response(scope, receive, send)
