"""All names of uvicorn in the service; pyproject.toml bounds its version."""

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.lifespan.on import LifespanOn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from preblock.service.server.descriptor_reserve import DescriptorReserve
from preblock.service.server.tls_handshake import TlsHandshake

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


class Server(uvicorn.Server):
    """A server with a time limit of TLS handshakes; uvicorn has no setting for it.

    Args:
        config: of the server.
        handshake_timeout_seconds: time of a handshake.

    """

    def __init__(self, config: Config, handshake_timeout_seconds: float) -> None:
        super().__init__(config)
        self._handshake_timeout_seconds = handshake_timeout_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections of `sockets`."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config, loop, state = self.config, asyncio.get_running_loop(), self.lifespan.state
        protocol: Callable[[], asyncio.Protocol]
        protocol = partial(config.http_protocol_class, config, self.server_state, state)  # type: ignore[call-arg]
        if config.ssl is not None:
            connections, tasks = connections_of(self.server_state), self.server_state.tasks
            reserve = DescriptorReserve.of(state, loop, connections)
            seconds = self._handshake_timeout_seconds
            protocol = partial(TlsHandshake, protocol, config.ssl, seconds, connections, tasks, reserve)
        self.servers = [
            await loop.create_server(protocol, sock=listener, backlog=config.backlog) for listener in sockets or ()
        ]
        self.started = True


def connections_of(state: ServerState) -> set[Any]:
    """Return the open connections for the server to shut down. uvicorn's type lists only its own classes."""
    return cast(set[Any], state.connections)


def write_without_chunks(protocol: HttpToolsProtocol, size: int) -> None:
    """Let `protocol` write the next `size` bytes of a response without `Content-Length` as they are.

    uvicorn writes chunks to every client; RFC 9112, section 6.1, forbids them in a response to HTTP/1.0.
    """
    protocol.cycle.chunked_encoding, protocol.cycle.expected_content_length = False, size
