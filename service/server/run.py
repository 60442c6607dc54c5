"""Serve in one process, or in several that share a listening socket and, through the page cache, the tables."""

import asyncio
import gc
import logging
import logging.config
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import cast

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.app import VERSION, create_app, create_engine, create_tracing
from preblock.service.core.auth import SERVICE
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.settings import Settings
from preblock.service.core.tls import load_certificates, reloading_context
from preblock.service.engine.engine import Engine
from preblock.service.observability import process_metrics
from preblock.service.observability.logs import configuration
from preblock.service.runtime.model import ServedModel
from preblock.service.runtime.model_control import loading_hint
from preblock.service.runtime.worker_states import write_desired
from preblock.service.server.addresses import Bound, allowed_hosts, bind_http, hold_grpc_address
from preblock.service.server.http_connection import HttpConnection
from preblock.service.server.outage import OutageServer
from preblock.service.server.supervisor import ParentPipe, Supervisor, start_forkserver
from preblock.service.server.uvicorn_bridge import Config, ConnectionFactory, Server

LOG = logging.getLogger(__name__)
PRELOADED_MODULES, PRELOADED_GRPC = ["preblock.service.server.preload"], ["preblock.service.api.grpc.server"]
PRELOADED_TRACING = ["preblock.service.observability.tracing", "requests"]
"""Modules for workers with tracing; the exporter imports `requests` late."""
KEEP_ALIVE_SECONDS = 75
"""Time until an idle connection is closed. Proxies such as nginx and AWS use one again after up to 60 seconds, and a
POST into a closing connection would fail."""
SWITCH_INTERVAL_SECONDS = 0.0005
"""Longest time that a working thread keeps the interpreter while the event loop waits. Python's default is 0.005.

Each event may wait so long: beside 60 large requests, a small one waits 60 times.
"""

Models = dict[str, ServedModel]
Announce = Callable[[Settings, str, Models], None]


def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT, and finish requests in flight.

    Connections are refused until the models are open. `announce` then receives the settings with the real port of gRPC,
    the URL, and the models.

    Raises:
        Invalid: an address, the key file or a TLS file cannot be used, or tracing cannot be set up.
        ServerFault: the provider cannot be used, or an artifact is broken.

    """
    logging.config.dictConfig(configuration(settings.log_format, settings.log_level))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until it serves; an exception removes a Unix socket
    load_certificates(settings)
    with hold_grpc_address(settings) as found, bind_http(found) as bound:
        _serve_on(bound, found, announce)
    LOG.info("stopped")


def _serve_on(bound: Bound, settings: Settings, announce: Announce) -> None:
    url = bound.url

    def start(models: Models) -> None:
        places = f"{url} and gRPC on {settings.grpc_address}" if settings.has_grpc else url
        text = "started: preblock %s serves %d models on %s with workers: %d"
        LOG.info(text, VERSION, len(models), places, settings.workers)
        if not models and settings.model_control != "explicit":
            hint = loading_hint(settings.model_control, settings.model_poll_interval_seconds)
            LOG.warning("not ready: the repository %s holds no model; %s", settings.repository, hint)
        if settings.log_format == "json":  # for a program, which reads the line above
            return
        # A full standard output would block the event loop.
        Thread(target=announce, args=(settings, url, models), daemon=True).start()

    run = _serve_in_process if settings.workers == 1 else _serve_with_workers
    run(settings, bound, start)


def _serve_in_process(settings: Settings, bound: Bound, announce: Callable[[Models], None]) -> None:
    engine = create_engine(settings)
    app = create_app(settings, engine, allowed_hosts(settings, bound.socket))
    # No variable of this frame may hold the models: it would keep replaced versions open.
    server = _Server(
        configure(settings, app),
        settings.header_timeout_seconds,
        bound.listen,
        partial(announce, _log_models(engine)),
    )
    # uvicorn takes over SIGTERM and SIGINT, and raises its stop signal again at the end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.stop_early)
    signal.signal(signal.SIGHUP, lambda *_: None)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _enable_garbage_collection()
    server.run(sockets=[bound.socket])


def _serve_with_workers(settings: Settings, bound: Bound, announce: Callable[[Models], None]) -> None:
    # Open everything here first: a broken artifact is reported once, before any worker starts.
    if (tracing := create_tracing(settings)) is not None:
        tracing.close()
    engine = create_engine(settings)
    models, desired = _log_models(engine), engine.control.first_state()
    del engine  # each worker opens its own models; this process would keep replaced versions open
    with tempfile.TemporaryDirectory(prefix="preblock-") as folder:
        counters, control = Path(folder) / "metrics", Path(folder) / "control"
        counters.mkdir()
        control.mkdir()
        write_desired(control, desired)
        os.environ[process_metrics.FOLDER] = str(counters)  # prometheus_client reads it when imported
        supervisor = Supervisor(
            settings,
            partial(serve_as_worker, bound.socket, counters, control),
            partial(_open_address, bound.listen, announce, models),
            OutageServer(bound.socket, allowed_hosts(settings, bound.socket), configure),
        )
        del models
        grpc = PRELOADED_GRPC if settings.has_grpc else []
        tracing_modules = PRELOADED_TRACING if settings.tracing != "none" else []
        start_forkserver([*grpc, *tracing_modules, *PRELOADED_MODULES])
        _enable_garbage_collection()
        supervisor.run()
    if supervisor.killed_by:
        sys.exit(128 + supervisor.killed_by)


def _open_address(listen: Callable[[], None], announce: Callable[[Models], None], models: Models) -> None:
    """Accept connections, and announce it; another server may have the address by now."""
    listen()
    announce(models)


def _log_models(engine: Engine) -> Models:
    """Log each opened version, and return the highest version of each model."""
    for model in engine.repository.all(SERVICE):
        LOG.info("model %s version %d opened, on %s", model.name, model.version, model.provider)
    return engine.repository.newest(SERVICE)


def _enable_garbage_collection() -> None:
    """Enable garbage collection, but exclude the objects of the start: scanning them would delay a request."""
    gc.freeze()
    gc.enable()


def serve_as_worker(
    listener: socket.socket, counters: Path, control: Path, settings: Settings, parent: ParentPipe
) -> None:
    """Serve in a worker until SIGTERM."""
    create = partial(_create_worker_app, listener, counters, control, settings, parent)
    try:
        config = configure(settings, create, factory=True)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        Server(config, settings.header_timeout_seconds, parent.report_serving).run(sockets=[listener])
    except Invalid as error:  # the TLS files have changed
        parent.report_failure(str(error))
        raise SystemExit(1) from None


def _create_worker_app(
    listener: socket.socket, counters: Path, control: Path, settings: Settings, parent: ParentPipe
) -> Dispatcher:
    """Create the application of a worker. After an error the worker exits, and the parent logs the reason."""
    try:
        process_metrics.reserve(counters)
        return create_app(settings, create_engine(settings, control), allowed_hosts(settings, listener))
    except (PreblockError, OSError) as error:
        parent.report_failure(str(error))
        raise SystemExit(1) from None


class _Server(Server):
    """Announces when it accepts connections."""

    def __init__(
        self, config: Config, handshake_timeout_seconds: float, listen: Callable[[], None], announce: Callable[[], None]
    ) -> None:
        super().__init__(config, handshake_timeout_seconds, listen)  # uvloop would not report an address in use
        self._announce = announce

    def stop_early(self, _number: int, _frame: FrameType | None) -> None:
        """End the server after its start, at a signal before uvicorn handles signals."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish requests in flight; at a second signal, exit at once."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        self._announce()
        del self._announce  # with its models

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests in flight."""
        LOG.info("stopping: requests in flight finish")
        await super().shutdown(sockets)


def configure(settings: Settings, app: Callable[..., object], factory: bool = False) -> Config:
    """Return the server's configuration for `app`, or for the result of `app` if `factory` is true."""
    certificates = load_certificates(settings)
    return Config(
        app,
        factory=factory,
        lifespan="on",
        log_config=configuration(settings.log_format, settings.log_level),
        access_log=False,
        server_header=False,
        http=cast(type[asyncio.Protocol], ConnectionFactory(HttpConnection, settings)),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",  # `HttpConnection` handles WebSockets
        ws_max_size=settings.max_body_bytes,
        ws_ping_timeout=None,  # a busy client may be silent; dead ones end by the limits of a stream and of TCP
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=settings.shutdown_timeout_seconds,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key,
        ssl_context_factory=None if certificates is None else partial(reloading_context, certificates),
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_networks,
    )
