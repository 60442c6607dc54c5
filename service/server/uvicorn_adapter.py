"""Every name of uvicorn that the service uses; pyproject.toml bounds its version."""

from typing import Any, cast

from uvicorn import Config, Server
from uvicorn.config import STARTUP_FAILURE
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

__all__ = [
    "STARTUP_FAILURE",
    "Config",
    "HttpToolsProtocol",
    "ProxyHeadersMiddleware",
    "Server",
    "ServerState",
    "WebSocketsSansIOProtocol",
]


def connections_of(state: ServerState) -> set[Any]:
    """Return the open connections: the server shuts them down. Its own type knows only classes of uvicorn."""
    return cast(set[Any], state.connections)
