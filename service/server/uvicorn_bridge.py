"""The bridge to uvicorn, with all of its names in the service: server, lifespan, cycles of requests, WebSockets.

`UvicornBridge` hands parsed requests to an application. It builds uvicorn's `RequestResponseCycle` itself, because
uvicorn's protocol would parse each head again. That class is no public interface: the tests ran with uvicorn 0.54, and
pyproject.toml allows no other version.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.lifespan.on import LifespanOn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from preblock.service.api.http.dispatcher import held_by
from preblock.service.api.streams import LIFETIME
from preblock.service.server.descriptor_reserve import DescriptorReserve
from preblock.service.server.incoming_request import IncomingRequest
from preblock.service.server.tls_handshake import TlsHandshake

__all__ = [
    "STARTUP_FAILURE",
    "Config",
    "InnerTransport",
    "LifespanOn",
    "ProxyHeadersMiddleware",
    "Server",
    "ServerState",
    "UvicornBridge",
    "WebSocketsSansIOProtocol",
    "connections_of",
]
ERROR_LOG, ACCESS_LOG = logging.getLogger("uvicorn.error"), logging.getLogger("uvicorn.access")


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


class InnerTransport(asyncio.Transport):
    """What uvicorn takes for its transport: it writes to the connection, and leaves the rest to callbacks.

    Args:
        transport: of the connection.
        close: called in place of closing the connection.
        is_closing: returns whether the connection is closed or closing.
        pause_reading: called in place of pausing the connection.
        resume_reading: called in place of resuming the connection.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        is_closing: Callable[[], bool],
        pause_reading: Callable[[], None],
        resume_reading: Callable[[], None],
    ) -> None:
        super().__init__()
        self._transport = transport
        self.close = close  # type: ignore[method-assign]
        self.is_closing = is_closing  # type: ignore[method-assign]
        self.pause_reading = pause_reading  # type: ignore[method-assign]
        self.resume_reading = resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, unless the connection is closing."""
        if not self.is_closing():
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information of the connection's transport."""
        return self._transport.get_extra_info(name, default)


class EndedTransport(asyncio.Transport):
    """The transport of an exchange after its response."""

    def is_closing(self) -> bool:
        """Return that nothing can be written."""
        return True

    def close(self) -> None:
        """Do nothing."""


ENDED = EndedTransport()


class Connection(Protocol):
    """What the bridge uses of a connection."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[None]]
    client: tuple[str, int] | None
    scheme: str

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""

    def close(self) -> None:
        """Close the connection after the responses written so far."""

    def pause_reading(self) -> None:
        """Read no more of the body."""

    def resume_reading(self) -> None:
        """Read on."""

    def finish(self) -> None:
        """End the active request after its response."""

    def fail(self) -> None:
        """Handle the current exception."""


class Exchange(RequestResponseCycle):
    """A request and its response, with a body that may end before its malformed or late rest.

    Attributes:
        is_cut: whether the rest of the body is malformed or late.

    """

    is_cut = False

    async def receive(self) -> Any:
        """Receive a chunk of the body. After the last chunk of a cut body, report a disconnect."""
        if self.is_cut and not self.body:
            self.disconnected = True  # it drops the rest of the response
        return await super().receive()


class ExchangeWithoutChunks(Exchange):
    """The exchange of a client of HTTP/1.0: the close ends a response of unknown length.

    uvicorn writes chunks to every client; RFC 9112, section 6.1, forbids them in a response to HTTP/1.0.
    """

    ends_by_close = False

    async def send(self, message: Any) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            self.ends_by_close = b"content-length" not in dict(message["headers"])
        if self.ends_by_close:
            self.chunked_encoding, self.expected_content_length = False, len(message.get("body", b""))
        await super().send(message)


class UvicornBridge:
    """Hands the requests of one connection to the application, one at a time.

    Args:
        connection: of the client.
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application; each request has a copy.
        context: context variables for each request to begin with.

    """

    def __init__(
        self,
        connection: Connection,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        context: Context,
    ) -> None:
        self._connection, self._server_state, self._app_state = connection, server_state, app_state
        self._app: ASGIApp = config.loaded_app
        self._asgi_version = config.asgi_version
        self._context = context
        callbacks = self._close, connection.is_closing, connection.pause_reading, connection.resume_reading
        self._transport = InnerTransport(connection.transport, *callbacks)
        self._flow = FlowControl(self._transport)
        self._server = get_local_addr(connection.transport)
        self._exchange: Exchange | None = None
        self._incoming: IncomingRequest | None = None

    @property
    def held(self) -> int:
        """Bytes of memory that the response in progress holds."""
        return 0 if self._exchange is None else held_by(cast(Scope, self._exchange.scope))

    @property
    def answer_begun(self) -> bool:
        """Whether a part of the response in progress was written."""
        return self._exchange is not None and self._exchange.response_started

    def begin(self, incoming: IncomingRequest) -> bool:
        """Start the application for a request, with the body received so far; return False if its URL is malformed."""
        try:
            url = httptools.parse_url(incoming.url)
            path = url.path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):  # no path
            return False
        scope = {
            "type": "http",
            "asgi": {"version": self._asgi_version, "spec_version": "2.3"},
            "http_version": incoming.version,
            "server": self._server,
            "client": self._connection.client,
            "scheme": self._connection.scheme,
            "root_path": "",
            "headers": [*incoming.headers, *incoming.identifying],
            "state": self._app_state.copy(),
            "method": incoming.method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        self._exchange = exchange = (Exchange if incoming.knows_chunks else ExchangeWithoutChunks)(
            scope=cast(Any, scope),
            transport=self._transport,
            flow=self._flow,
            logger=ERROR_LOG,
            access_logger=ACCESS_LOG,
            access_log=False,
            default_headers=self._server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=incoming.expects_continue and incoming.knows_chunks,
            keep_alive=incoming.keep_alive and incoming.version != "1.0",
            on_response=self._finish,
        )
        self._incoming = incoming
        chunks, incoming.chunks = incoming.chunks, []
        for chunk in chunks:
            self.send_body(chunk)
        if incoming.complete:
            self.send_end()
        elif incoming.refusal is not None:
            self.cut_body()
        connection = self._connection
        task = connection.loop.create_task(exchange.run_asgi(cast(Any, self._app)), context=self._context.copy())
        connection.tasks.add(task)
        task.add_done_callback(partial(self._end, exchange))
        return True

    def _end(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """Finish a request whose application has returned without a complete response."""
        self._connection.tasks.discard(task)
        if exchange is self._exchange:
            self._finish()

    def _finish(self) -> None:
        """Finish the request; its application may still run."""
        exchange, incoming, connection = self._exchange, self._incoming, self._connection
        if exchange is None or incoming is None:
            return
        incoming.answer_begun = exchange.response_started
        exchange.transport = ENDED  # an error after the response must not close the connection during the next one
        self._exchange = self._incoming = None
        try:
            self._flow.resume_reading()
            connection.finish()
        except Exception:
            connection.fail()

    def _close(self) -> None:
        """Close the connection during a response; between responses the connection decides."""
        if self._exchange is not None:
            self._connection.close()

    def send_body(self, body: bytes) -> None:
        """Forward a chunk of the request body, unless the request is answered."""
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            exchange.body += body
            if len(exchange.body) > HIGH_WATER_LIMIT:
                self._flow.pause_reading()
            exchange.message_event.set()

    def send_end(self) -> None:
        """Forward the end of the request body."""
        if self._exchange is not None and not self._exchange.response_complete:
            self._exchange.more_body = False
            self._exchange.message_event.set()

    def cut_body(self) -> None:
        """End the request body before its malformed or late rest, by a disconnect after the last chunk."""
        if self._exchange is not None:
            self._exchange.is_cut = True
            self._exchange.message_event.set()

    def shutdown(self) -> None:
        """Announce in the response in progress that the connection closes after it."""
        if self._exchange is not None:
            self._exchange.keep_alive = False

    def connection_lost(self) -> None:
        """Notify the application and its open stream of the client's disconnect."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.disconnected = not exchange.response_complete
        exchange.message_event.set()
        self._flow.resume_writing()
        if (lifetime := exchange.scope["state"].get(LIFETIME)) is not None:
            lifetime.end("left")

    def pause_writing(self) -> None:
        """Pause the response, because the client does not read."""
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Resume the response."""
        self._flow.resume_writing()
