"""The processes that serve. Several share one listening socket, and the tables through the page cache."""

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.supervisors import Multiprocess

from incipit.service import metrics
from incipit.service.app import create_app, create_engine
from incipit.service.errors import Invalid
from incipit.service.log import LOGGING
from incipit.service.repository import Model, Stem
from incipit.service.settings import Settings
from incipit.service.streams import LIFETIME

BACKLOG = 2048
GRACE_SECONDS = 20
"""Time that requests in flight have to finish after SIGTERM; those of gRPC have theirs after it."""

Announce = Callable[[str, list[Model | Stem]], None]


def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are finished.

    `announce` is told the address and the models once connections are accepted.

    Raises:
        Invalid: an address cannot be listened on.
        ServerFault: the provider cannot be used, or an artifact is broken.

    """
    listener = listen("port", settings.host, settings.port)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
        # Who does not read is dropped, and with him what waits to be sent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * settings.stream_idle_seconds)
    if settings.grpc_port is not None:
        # Only whether it is free: gRPC itself would share a port with another server without a word.
        listen("grpc-port", settings.host, settings.grpc_port).close()
    address = _url(settings.host, listener.getsockname()[1])
    if settings.workers == 1:
        app = create_app(settings)
        # uvicorn raises the signal that ended it once more; it has been obeyed already.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        server = _Server(configure(settings, app))
        server.announce = partial(announce, address, app.app.state.engine.repository.newest())
        server.run(sockets=[listener])
        return
    # In this process first: what is broken is said once, before any worker starts.
    models = create_engine(settings).repository.newest()
    with tempfile.TemporaryDirectory(prefix="incipit-") as folder:
        counters, shared = Path(folder) / "metrics", Path(folder) / "control"
        counters.mkdir()
        shared.mkdir()
        os.environ[metrics.FOLDER] = str(counters)
        processes = Multiprocess(configure(settings, partial(create_app, settings, shared), factory=True), [listener])
        announce(address, models)  # from now on it obeys signals
        processes.run()


class _Http(HttpToolsProtocol):
    """Ends the decode streams when the server stops, and one whose client leaves; uvicorn alone would go on."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        if cycle is not None and (lifetime := cycle.scope["state"].get(LIFETIME)):
            lifetime.end("left")

    def shutdown(self) -> None:
        super().shutdown()
        self.app_state["streams"].drain()


class _WebSocket(WebSocketsSansIOProtocol):
    """Lets a decode stream say where it is before it is closed."""

    def shutdown(self) -> None:
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
        self.app_state["streams"].drain()


class _Server(uvicorn.Server):
    """Says when it has started, gRPC included."""

    announce: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()


def listen(field: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that no connection is refused from now on.

    Raises:
        Invalid: the address cannot be listened on.

    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Invalid(field, f"{host}:{port}", f"an address to listen on ({error.strerror})") from error


def configure(settings: Settings, app: Callable[..., object], factory: bool = False) -> uvicorn.Config:
    """Return how `app` is served, whatever it is; with `factory`, what makes it."""
    return uvicorn.Config(
        app,
        factory=factory,
        workers=settings.workers,
        lifespan="on",
        log_config=LOGGING,
        access_log=False,
        server_header=False,
        http=_Http,
        ws=_WebSocket,
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
