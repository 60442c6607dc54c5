"""The processes that serve. Several share one listening socket, and the tables through the page cache."""

import gc
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from threading import Thread
from types import FrameType

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.app import create_app, create_engine, create_tracing
from preblock.service.core.auth import as_service
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.heap import keep_pages
from preblock.service.core.settings import Settings, listed
from preblock.service.core.settings_reload import SettingsReloader
from preblock.service.core.tls import check_tls, follow
from preblock.service.observability import metric_files
from preblock.service.observability.logs import configuration
from preblock.service.runtime.repository import Model, Stem
from preblock.service.server.http_protocol import Http, WebSocket
from preblock.service.server.startup_server import Meanwhile

LOG = logging.getLogger(__name__)
FORKED = multiprocessing.get_context("forkserver")
PRELOADED, PRELOADED_GRPC = ["preblock.service.server.preload"], ["preblock.service.api.grpc.server"]
PRELOADED_TRACING = ["preblock.service.observability.tracing", "requests"]
"""Where requests are traced, with what the exporter imports once it is made."""
BACKLOG = 2048
PATIENCE_SECONDS = 30
"""After which a worker that does not answer its parent is replaced; one that starts on a busy machine may take some."""
LOOK_SECONDS = 0.01
"""Between two looks whether the first worker serves."""
MOST_OF_A_FOLDER, SHORT_FOLDER = 75, "/tmp"
"""Bytes of the name of a folder in which a socket has an address (108 bytes in all, unix(7)), and one for others."""
OPENED = "opened"
"""The file of the folder `control` that says so."""
GRACE_SECONDS = 20
"""Time that requests in flight have to finish after SIGTERM; those of gRPC have theirs after it."""

Announce = Callable[[str, list[Model | Stem]], None]


def serve(settings: Settings, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are finished.

    `announce` is told the address and the models once connections are accepted.

    Raises:
        Invalid: an address cannot be listened on, a file of keys or of TLS cannot be used, or nothing can be traced.
        ServerFault: the provider cannot be used, or an artifact is broken.

    """
    check_tls(settings)
    keep_pages()
    listener = listen("port", settings.host, settings.port)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
        # Who does not read is dropped, and with him what waits to be sent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * settings.stream_idle_seconds)
    if settings.grpc_port is not None:
        # Only whether it is free: gRPC itself would share a port with another server without a word.
        listen("grpc-port", settings.host, settings.grpc_port).close()
    address = _url("https" if settings.tls_cert_file else "http", settings.host, listener.getsockname()[1])
    with Meanwhile(settings, configure, listener) as meanwhile:
        serve_ = _serve_alone if settings.workers == 1 else _serve_several
        serve_(settings, listener, meanwhile, partial(announce, address))


def _serve_alone(
    settings: Settings, listener: socket.socket, meanwhile: Meanwhile, announce: Callable[[list[Model | Stem]], None]
) -> None:
    engine = create_engine(settings, progress=meanwhile.progress)
    app = create_app(settings, engine)
    with as_service():
        models = engine.repository.newest()
    # uvicorn raises the signal that ended it once more; it has been obeyed already.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    server = _Server(configure(settings, app))
    server.announce = partial(announce, models)
    meanwhile.close()
    _look_for_garbage()
    server.run(sockets=[listener])


def _serve_several(
    settings: Settings, listener: socket.socket, meanwhile: Meanwhile, announce: Callable[[list[Model | Stem]], None]
) -> None:
    # In this process first: what is broken is said once, before any worker starts.
    if (tracing := create_tracing(settings)) is not None:
        tracing.close()
    with as_service():
        models = create_engine(settings, progress=meanwhile.progress).repository.newest()
    with tempfile.TemporaryDirectory(prefix="preblock-") as folder:
        counters, shared = Path(folder) / "metrics", Path(folder) / "control"
        counters.mkdir()
        shared.mkdir()
        os.environ[metric_files.FOLDER] = str(counters)  # which is looked for when that is imported
        processes = _Workers(settings, partial(_work, counters, shared), [listener])
        _prepare(settings)
        hand_over = Thread(target=_hand_over, args=(shared / OPENED, meanwhile, announce, models), daemon=True)
        del models  # which the workers open themselves; versions that are replaced would stay open here
        hand_over.start()  # from now on it obeys signals
        _look_for_garbage()
        processes.run()
    if processes.told:
        sys.exit(128 + processes.told)


def _look_for_garbage() -> None:
    """Look for it from now on, but never among what stays: a search through that would hold a request up."""
    gc.freeze()
    gc.enable()


def _prepare(settings: Settings) -> None:
    """Start the process that workers are forked from, which is asked by a socket among the temporary files.

    Raises:
        Invalid: there can be none.

    """
    grpc = PRELOADED_GRPC if settings.grpc_port is not None else []
    tracing = PRELOADED_TRACING if settings.tracing != "none" else []
    FORKED.set_forkserver_preload([*grpc, *tracing, *PRELOADED])
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # it has a thread, and a file open, as soon as it is imported
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MOST_OF_A_FOLDER:
        tempfile.tempdir = SHORT_FOLDER
    try:
        ensure_running()
    except OSError as error:
        allowed = f"a folder for the socket by which workers are started ({error})"
        raise Invalid("TMPDIR", tempfile.gettempdir(), allowed) from error
    finally:
        tempfile.tempdir = folder


def _work(counters: Path, shared: Path, settings: Settings) -> Dispatcher:
    """Return the application of a worker. One that cannot start says why in a line, and is tried again."""
    try:
        metric_files.reserve(counters)
        app = create_app(settings, create_engine(settings, shared))
        (shared / OPENED).touch()
    except (PreblockError, OSError) as error:
        LOG.error("a worker cannot start, and is tried again: %s", error)
        raise SystemExit(1) from None
    return app


def _hand_over(
    opened: Path, meanwhile: Meanwhile, announce: Callable[[list[Model | Stem]], None], models: list[Model | Stem]
) -> None:
    """Leave the address to the first worker that says that it serves now."""
    while not opened.exists():
        time.sleep(LOOK_SECONDS)
    meanwhile.close()
    announce(models)


class _Server(uvicorn.Server):
    """Says when it has started, gRPC included."""

    announce: Callable[[], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish what is in flight, or, told a second time, nothing more."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()


class _Worker(Process):
    """One that serves. It is forked from a process that has imported what it needs, and shares the pages of that."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        self.process = FORKED.Process(target=self._begin, args=(sockets,))  # type: ignore[assignment]

    def _begin(self, sockets: list[socket.socket]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored by the process that it was forked from
        self.parent_conn.close()  # the parent's alone: what it asks ends with it
        keep_pages()
        self.config.configure_logging()
        with suppress(KeyboardInterrupt):  # raised once more by the server that has obeyed it
            self.target(sockets)

    def always_pong(self) -> None:
        """Answer the parent until it is gone, however it went, or takes this worker for dead; then end.

        The port would be taken, and nobody would replace who dies.
        """
        with suppress(EOFError, OSError):
            super().always_pong()
        os.kill(os.getpid(), signal.SIGTERM)


class _Workers(Multiprocess):
    """Several processes that serve.

    SIGHUP changes nothing, as with one process: files that may change are followed.
    """

    def __init__(
        self, settings: Settings, work: Callable[[Settings], Dispatcher], sockets: list[socket.socket]
    ) -> None:
        self._following, self._work = SettingsReloader(settings, told=True), work
        super().__init__(self._configured(), sockets)
        self.told = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _configured(self) -> uvicorn.Config:
        """Return how a worker serves that starts now."""
        settings = self._following.settings
        return configure(settings, partial(self._work, settings), factory=True)

    def _end(self, number: int, _: FrameType | None) -> None:
        """Let the workers finish what is in flight, or, told a second time, nothing more."""
        if not self.processes:  # the first of them is waited for
            sys.exit()
        if self.should_exit.is_set() or number in self.signal_queue:
            self.told = number
            for process in self.processes:
                process.process.kill()
        self.signal_queue.append(number)

    def init_processes(self) -> None:
        """Start those that are missing. Where one cannot be, they are tried again in a while."""
        while len(self.processes) < self.processes_num and not self.should_exit.is_set():
            worker = _Worker(self.config, self.sockets)
            try:
                worker.start()
            except (OSError, EOFError) as error:  # such as too many processes
                LOG.error("a worker cannot be started, and is tried again: %s", error)
                break
            self.processes.append(worker)

    def keep_subprocess_alive(self) -> None:
        """Replace who has ended, and who does not answer."""
        if self._following.changed():
            self.config = self._configured()
        for process in tuple(self.processes):
            # Were the worker's end of the pipe open here too, one that ended while it was asked would be waited for.
            process.child_conn.close()
            if self.should_exit.is_set() or process.is_alive(self.config.timeout_worker_healthcheck):
                continue
            process.kill()
            process.join()
            self.processes.remove(process)
            if process.exitcode == STARTUP_FAILURE:  # of the server, not of a model: the next would fail as well
                LOG.error("a worker cannot serve, and the service ends")
                self.should_exit.set()
            else:
                LOG.info("worker %s has ended, and is replaced", process.pid)
            self.init_processes()
        self.init_processes()

    def handle_hup(self) -> None:
        """Change nothing."""

    handle_ttin = handle_ttou = handle_hup


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
        log_config=configuration(settings.log_format, settings.log_level),
        access_log=False,
        server_header=False,
        http=Http,
        ws=WebSocket,
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_worker_healthcheck=PATIENCE_SECONDS,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key,
        ssl_context_factory=None if settings.tls_cert_file is None else follow,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=listed(settings.trusted_proxies),
    )


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
