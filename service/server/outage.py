"""Answers health checks in the parent process while no worker serves."""

import socket
from collections.abc import Callable
from threading import Thread
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.core.errors import Unavailable
from preblock.service.core.settings import Settings
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.uvicorn_adapter import Config, Server

LIVE_PATHS = frozenset({"/livez", "/v2/health/live"})
MESSAGE = "no worker serves at the moment, and the service starts new ones; try again later"


class OutageServer:
    """A server on the address of the workers, which accepts connections between `begin` and `end`.

    Args:
        settings: of the service.
        listener: the listening socket, shared with the workers.
        configure: returns the configuration of the server for an application.

    """

    def __init__(
        self, settings: Settings, listener: socket.socket, configure: Callable[[Settings, Any], Config]
    ) -> None:
        self._listener, self._seconds = listener, settings.header_timeout_seconds
        self._config = configure(settings, OutageApp(settings))
        self._server: Server | None = None

    def begin(self) -> None:
        """Accept connections, in a thread."""
        if self._server is None:
            self._server = Server(self._config, self._seconds)
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

    def __init__(self, settings: Settings) -> None:
        self._settings = LiveSettings(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or a WebSocket, or run the lifespan of the server (ASGI 3)."""
        if scope["type"] == "lifespan":
            scope["state"]["settings"] = self._settings
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        context = RequestContext.of(scope["headers"])
        CURRENT_REQUEST.set(context)
        response = Response()
        if scope["path"] not in LIVE_PATHS:
            error = Unavailable("workers", "none", "a serving worker", message=MESSAGE)
            response = errors.respond(error, scope["path"])
        response.raw_headers += context.headers()
        await response(scope, receive, send)
