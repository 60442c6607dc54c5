"""The bridge to uvicorn, with all of its names in the service: server, cycles of requests, WebSockets.

`UvicornBridge` hands parsed requests to an application. It builds uvicorn's `RequestResponseCycle` itself, because
uvicorn's protocol would parse each head again. That class is no public interface: the tests ran with uvicorn 0.54, and
pyproject.toml allows no other version.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn import Config as Config
from uvicorn.config import STARTUP_FAILURE as STARTUP_FAILURE
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol as WebSocketsSansIOProtocol
from uvicorn.server import ServerState as ServerState

from preblock.service.api.http.dispatcher import Dispatcher, Services
from preblock.service.core.errors import PreblockError
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.descriptor_reserve import DescriptorReserve
from preblock.service.server.incoming_request import IncomingRequest
from preblock.service.server.read_scheduler import ReadTurns
from preblock.service.server.tls import TlsHandshake

ERROR_LOG, ACCESS_LOG = logging.getLogger("uvicorn.error"), logging.getLogger("uvicorn.access")


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """The client of a connection.

    Args:
        transport: of the connection.
        address: host and port; None over a Unix socket.
        scheme: of its requests.
        context: context variables for each request to begin with.

    """

    transport: asyncio.Transport
    address: tuple[str, int] | None
    scheme: str
    context: Context


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What the connections of one server share.

    Args:
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the lifespan of the application; each request has a copy.
        loop: of the connections.
        dispatcher: answers tensor requests; has no routes for them if the application is another one.
        services: of the application.
        proxies: finds the client behind a trusted proxy; None without such proxies.
        turns: order of large input.
        reserve: of descriptors.
        connections: that are open.
        tasks: in progress.

    """

    config: Config
    server_state: ServerState
    app_state: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    dispatcher: Dispatcher
    services: Services
    proxies: ProxyHeadersMiddleware | None
    turns: ReadTurns
    reserve: DescriptorReserve
    connections: set[Any]
    tasks: set[asyncio.Task[None]]

    def origin(self, client: Client, headers: list[tuple[bytes, bytes]]) -> tuple[tuple[str, int] | None, str]:
        """Return address and scheme of a request, as reported by a trusted proxy in `headers`."""
        if self.proxies is None:
            return client.address, client.scheme
        scope: dict[str, Any] = {"type": "http", "client": client.address, "scheme": client.scheme, "headers": headers}
        with suppress(StopIteration):  # the middleware awaits nothing
            self.proxies(cast(Any, scope), _null_app, _null_app).send(None)
        return scope["client"], scope["scheme"]


async def _null_app(*_: object) -> Any:
    """Do nothing, as an application or as a channel of ASGI."""


class ConnectionFactory:
    """Creates the connections of one server; uvicorn calls it in place of a class of protocols.

    Args:
        create: returns a connection.
        settings: of the server, for an application other than a `Dispatcher`.

    """

    def __init__(self, create: Callable[[Shared], asyncio.Protocol], settings: Settings) -> None:
        self._create, self._settings = create, settings
        self._shared: Shared | None = None

    def share(self, config: Config, state: ServerState, app_state: dict[str, Any]) -> Shared:
        """Return what the connections of a server share."""
        if self._shared is None or self._shared.server_state is not state:
            app, proxies, loop = config.loaded_app, None, asyncio.get_running_loop()
            if isinstance(app, ProxyHeadersMiddleware):
                proxies, app = copy(app), app.app
                proxies.app = _null_app
            dispatcher = app if isinstance(app, Dispatcher) else Dispatcher(cast(ASGIApp, app), {})
            connections = cast(set[Any], state.connections)  # uvicorn's type lists only its own classes
            self._shared = Shared(
                config=config,
                server_state=state,
                app_state=app_state,
                loop=loop,
                dispatcher=dispatcher,
                services=dispatcher.services or Services.without_engine(LiveSettings(self._settings)),
                proxies=proxies,
                turns=ReadTurns(loop),
                reserve=DescriptorReserve(loop, connections),
                connections=connections,
                tasks=state.tasks,
            )
        return self._shared

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        """Return the connection of a new client."""
        return self._create(self.share(config, server_state, app_state))


class Server(uvicorn.Server):
    """A server with a time limit of TLS handshakes; uvicorn has no setting for it.

    Args:
        config: of the server.
        handshake_timeout_seconds: time of a handshake.
        opened: called after the start of the application, before it accepts connections; default: nothing.

    """

    def __init__(
        self, config: Config, handshake_timeout_seconds: float, opened: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._handshake_timeout_seconds, self._opened = handshake_timeout_seconds, opened

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish requests in flight, whatever signal follows the first: uvicorn itself would end at once at a SIGINT.

        A worker may get one from a terminal or service manager after the one from its parent.
        """
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections of `sockets`."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        try:
            self._opened()
        except PreblockError:
            await self.lifespan.shutdown()
            raise
        config, loop, state = self.config, asyncio.get_running_loop(), self.server_state
        factory = cast(ConnectionFactory, config.http_protocol_class)
        protocol: Callable[[], asyncio.Protocol] = partial(factory, config, state, self.lifespan.state)
        if config.ssl is not None:
            shared = factory.share(config, state, self.lifespan.state)
            own = shared.connections, shared.tasks, shared.reserve
            protocol = partial(TlsHandshake, protocol, config.ssl, self._handshake_timeout_seconds, *own)
        self.servers = [
            await loop.create_server(protocol, sock=listener, backlog=config.backlog) for listener in sockets or ()
        ]
        self.started = True


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

    async def run_asgi(self, app: Any) -> None:
        """Run the application. If the end of the server cancels it, close the connection; that is no error."""

        async def run(*channel: Any) -> None:
            try:
                await app(*channel)
            except asyncio.CancelledError:
                self.disconnected = True  # else uvicorn would answer with status 500
                self.transport.close()

        await super().run_asgi(run)

    async def receive(self) -> Any:
        """Receive a chunk of the body. After the last chunk of a cut body, report a disconnect."""
        if self.is_cut and not self.body:
            self.disconnected = True  # it drops the rest of the response
        return await super().receive()


class ExchangeWithoutChunks(Exchange):
    """The exchange of a client before HTTP/1.1: the close ends a response of unknown length.

    uvicorn writes chunks to every client; RFC 9112, section 6.1, forbids them in a response to HTTP/1.0. It also closes
    the connection of each; a client that asks for more requests expects the header `Connection` in the response.
    """

    ends_by_close = False

    async def send(self, message: Any) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            self.ends_by_close = b"content-length" not in names
            self.keep_alive = self.keep_alive and not self.ends_by_close
            if self.keep_alive and b"connection" not in names:
                message = {**message, "headers": [*message["headers"], (b"connection", b"keep-alive")]}
        if self.ends_by_close:
            self.chunked_encoding, self.expected_content_length = False, len(message.get("body", b""))
        await super().send(message)


class UvicornBridge:
    """Hands the requests of one connection to the application, one at a time.

    Args:
        connection: of the client.
        shared: what the connections of the server share.
        client: of the connection.

    """

    def __init__(self, connection: Connection, shared: Shared, client: Client) -> None:
        self._connection, self._shared, self._client = connection, shared, client
        callbacks = self._close, connection.is_closing, connection.pause_reading, connection.resume_reading
        self._transport = InnerTransport(client.transport, *callbacks)
        # Without a check: an exchange writes nothing after its disconnect.
        self._transport.write = client.transport.write  # type: ignore[method-assign]
        self._flow = FlowControl(self._transport)
        self._server = get_local_addr(client.transport)
        self._exchange: Exchange | None = None
        self._incoming: IncomingRequest | None = None
        self._context = client.context  # of the application, with its request

    @property
    def held(self) -> int:
        """Bytes of memory that the response in progress holds."""
        request = self._request
        return 0 if request is None else request.held

    @property
    def _request(self) -> RequestContext | None:
        """The request in progress, once the application has it."""
        return None if self._exchange is None else self._context.get(CURRENT_REQUEST)

    @property
    def has_begun(self) -> bool:
        """Whether a part of the response in progress was written."""
        return self._exchange is not None and self._exchange.response_started

    def begin(self, incoming: IncomingRequest) -> bool:
        """Start the application for a request, with the body received so far; return False if its URL is malformed."""
        scope = self._scope_of(incoming)
        if scope is None:
            return False
        shared, knows_chunks = self._shared, incoming.knows_chunks
        self._exchange = exchange = (Exchange if knows_chunks else ExchangeWithoutChunks)(
            scope=cast(Any, scope),
            transport=self._transport,
            flow=self._flow,
            logger=ERROR_LOG,
            access_logger=ACCESS_LOG,
            access_log=False,
            default_headers=shared.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=incoming.expects_continue and knows_chunks,
            keep_alive=incoming.keep_alive,
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
        self._context = context = self._client.context.copy()
        task = shared.loop.create_task(exchange.run_asgi(cast(Any, shared.config.loaded_app)), context=context)
        shared.tasks.add(task)
        task.add_done_callback(partial(self._end, exchange))
        return True

    def _scope_of(self, incoming: IncomingRequest) -> dict[str, Any] | None:
        """Return the ASGI scope of a request; None if its URL is malformed."""
        try:
            url = httptools.parse_url(incoming.url)
            path = url.path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):  # no path
            return None
        return {
            "type": "http",
            "asgi": {"version": self._shared.config.asgi_version, "spec_version": "2.3"},
            "http_version": incoming.version,
            "server": self._server,
            "client": self._client.address,
            "scheme": self._client.scheme,
            "root_path": "",
            "headers": [*incoming.headers, *incoming.identifying],
            "state": self._shared.app_state.copy(),
            "method": incoming.method.decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }

    def _end(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        """Finish a request whose application has returned without a complete response."""
        self._shared.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:  # uvicorn could not even send status 500
            ERROR_LOG.error("the task of a request has died; its connection is closed", exc_info=error)
            self._client.transport.abort()
        elif exchange is self._exchange:
            self._finish()

    def _finish(self) -> None:
        """Finish the request; its application may still run."""
        exchange, incoming, connection = self._exchange, self._incoming, self._connection
        if exchange is None or incoming is None:
            return
        incoming.answer_begun = exchange.response_started
        exchange.transport = ENDED  # an error after the response must not close the connection during the next one
        self._exchange = self._incoming = None
        self._context = self._client.context  # an idle connection keeps no request
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
        if (request := self._request) is not None and request.on_disconnect is not None:
            request.on_disconnect()

    def pause_writing(self) -> None:
        """Pause the response, because the client does not read."""
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Resume the response."""
        self._flow.resume_writing()
