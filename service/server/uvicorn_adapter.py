"""All names of uvicorn in the service; pyproject.toml bounds its version."""

from typing import Any, cast

from uvicorn import Config, Server
from uvicorn.config import STARTUP_FAILURE
from uvicorn.lifespan.on import LifespanOn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

__all__ = [
    "STARTUP_FAILURE",
    "Config",
    "HttpToolsProtocol",
    "LifespanOn",
    "ProxyHeadersMiddleware",
    "Server",
    "ServerState",
    "WebSocketsSansIOProtocol",
]


def connections_of(state: ServerState) -> set[Any]:
    """Return the open connections for the server to shut down. uvicorn's type lists only its own classes."""
    return cast(set[Any], state.connections)


def write_without_chunks(protocol: HttpToolsProtocol, size: int) -> None:
    """Let `protocol` write the next `size` bytes of a response without `Content-Length` as they are.

    uvicorn writes chunks to every client; RFC 9112, section 6.1, forbids them in a response to HTTP/1.0.
    """
    protocol.cycle.chunked_encoding, protocol.cycle.expected_content_length = False, size
