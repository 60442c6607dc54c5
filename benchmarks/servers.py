"""The measured servers of one graph: commands, requests and processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson

from benchmarks.environments import CannotRun, install
from benchmarks.streams import MODEL, SERVER_CORE
from benchmarks.tensors import BYTES, Protocol, native, open_inference
from tests.support.servers import free_port

PREBLOCK = Path(sys.executable).parent / "preblock"
HANDLERS = Path(__file__).parent / "peers"
GRAPH = Path("model_repository") / MODEL / "1" / "model.onnx"
PATIENCE = 90.0
"""Timeout in seconds of the start of a server, and of each answer."""
WARM = 20
"""Number of warm-up requests after a pause."""
JSON = {"Content-Type": "application/json"}


class Ports(NamedTuple):
    """The ports of a server."""

    http: int
    grpc: int
    further: int


class PeerServer(NamedTuple):
    """The command of a server, and the requests to it.

    Args:
        title: title in the table: name and protocol.
        start: returns its command from its Python, its ports and an empty folder.
        protocol: returns a request for ids.
        requirements: packages of its virtual environment; empty to run in the current one.
        python: required version of Python, such as 3.11.2; empty for the current one.
        grpc: whether it also serves gRPC.

    """

    title: str
    start: Callable[[Path, Ports, Path], Sequence[object]]
    protocol: Callable[[Any], Protocol]
    requirements: tuple[str, ...] = ()
    python: str = ""
    grpc: bool = False

    @property
    def title_of_grpc(self) -> str:
        """Title in the table for gRPC."""
        return f"{self.title.replace(':', ',').partition(',')[0]}, gRPC"


def raw(ids: Any) -> Protocol:
    """Return a request of raw bytes to a handler in `benchmarks/peers/`."""
    return Protocol(f"/embed?rows={len(ids)}", ids.astype("<i8").tobytes(), {"Content-Type": BYTES})


def canned(ids: Any) -> Protocol:
    """Return a request to the bare application for the number of bytes of the vectors."""
    return Protocol(f"/{ids.shape[0]}/{ids.shape[1]}", ids.astype("<i8").tobytes(), {"Content-Type": BYTES})


def v2_json(ids: Any) -> Protocol:
    """Return a request of the Open Inference Protocol in JSON."""
    tensor = {"name": "input_ids", "shape": ids.shape, "datatype": "INT64", "data": ids.ravel().tolist()}
    document = {"inputs": [tensor], "outputs": [{"name": "embeddings"}]}
    return Protocol(f"/v2/models/{MODEL}/infer", orjson.dumps(document), JSON)


def listed(name: str, path: str) -> Callable[[Any], Protocol]:
    """Return a function from ids to a JSON request with one field."""
    return lambda ids: Protocol(path, orjson.dumps({name: ids.tolist()}), JSON)


def script(name: str) -> Callable[[Path, Ports, Path], Sequence[object]]:
    """Return the command of a handler in `benchmarks/peers/`; its arguments are the ports of HTTP and gRPC."""
    both = name == "with_pytriton"
    return lambda python, ports, _: (python, HANDLERS / f"{name}.py", *ports[: 1 + both])


def mlserver(python: Path, ports: Ports, folder: Path) -> Sequence[object]:
    """Write the settings of MLServer, and return its command."""
    settings = {"host": "127.0.0.1", "http_port": ports.http, "grpc_port": ports.grpc, "metrics_port": ports.further}
    sizes = {"grpc_max_message_length": 2**30}
    (folder / "settings.json").write_text(json.dumps(settings | sizes | {"parallel_workers": 0, "debug": False}))
    model = {"name": MODEL, "implementation": "with_mlserver.MlserverPeer"}
    (folder / "model-settings.json").write_text(json.dumps(model))
    return (python.parent / "mlserver", "start", folder)


def bentoml(python: Path, ports: Ports, _: Path) -> Sequence[object]:
    """Return the command of BentoML."""
    return (python, "-m", "bentoml", "serve", "with_bentoml:BentoPeer", "--port", ports.http, "--host", "127.0.0.1")


def preblock(_: Path, ports: Ports, __: Path) -> Sequence[object]:
    """Return the command of Preblock."""
    return (PREBLOCK, "serve", "--port", ports.http, "--grpc-port", ports.grpc)


def bare(_: Path, ports: Ports, __: Path) -> Sequence[object]:
    """Return the command of the bare application, with a bare gRPC handler."""
    return (sys.executable, "-m", "benchmarks.fixed_responses", ports.http, ports.grpc)


SERVERS = {
    "floor": PeerServer("canned bytes: bare ASGI in Preblock's server", bare, canned, grpc=True),
    "uvicorn": PeerServer(
        "canned bytes: bare ASGI in plain uvicorn", script("with_uvicorn"), canned, ("uvicorn[standard]==0.54.0",)
    ),
    "preblock": PeerServer("Preblock, `.npy`", preblock, native, grpc=True),
    "preblock-v2": PeerServer("Preblock, V2 binary", preblock, open_inference),
    "fastapi": PeerServer(
        "plain FastAPI handler, raw bytes",
        script("with_fastapi"),
        raw,
        ("fastapi==0.163.2", "uvicorn[standard]==0.54.0", "numpy==2.4.6"),
    ),
    "mlserver": PeerServer("MLServer, V2 JSON", mlserver, v2_json, ("mlserver==1.7.1",), grpc=True),
    "litserve": PeerServer(
        "LitServe, JSON in, raw bytes out",
        script("with_litserve"),
        listed("input_ids", "/predict"),
        ("litserve==0.2.19",),
    ),
    "triton": PeerServer(
        "Triton with its Python backend, V2 binary",
        script("with_pytriton"),
        open_inference,
        ("nvidia-pytriton==0.7.0",),
        python="3.11.2",  # its Python stub is built for this standard library
        grpc=True,
    ),
    "ray": PeerServer("Ray Serve, FastAPI ingress, raw bytes", script("with_ray"), raw, ("ray[serve]==2.60.0",)),
    "bentoml": PeerServer("BentoML, JSON", bentoml, listed("ids", "/embed"), ("bentoml==1.4.30",)),
}


class RunningPeer:
    """A running server, paused by SIGSTOP except within `awake`.

    Args:
        server: the kind of server.
        process: its first process.
        ports: its ports.
        headers: further headers of each request of `ask`.

    Attributes:
        ready: whether it has answered a request.

    """

    def __init__(
        self, server: PeerServer, process: "subprocess.Popen[bytes]", ports: Ports, headers: Mapping[str, str]
    ) -> None:
        self.server, self.process, self.ports, self.headers = server, process, ports, headers
        self.ready = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Resume its processes for the block, after warm-up requests.

        Raises:
            CannotRun: the server does not answer.

        """
        self._tell(signal.SIGCONT)
        try:
            if self.ready:
                for _ in range(WARM):
                    self.ask(np.zeros((1, 1), np.int64))
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def ask(self, ids: Any) -> bytes:
        """Return the body of an answer.

        Raises:
            CannotRun: no answer came, or an error.

        """
        protocol = self.server.protocol(ids)
        address = f"http://127.0.0.1:{self.ports.http}{protocol.path}"
        request = urllib.request.Request(address, protocol.body, {**protocol.headers, **self.headers})
        try:
            with urllib.request.urlopen(request, None, PATIENCE) as r:
                body: bytes = r.read()
        except urllib.error.HTTPError as error:
            raise CannotRun(f"status {error.code}: {error.read()[:200]!r}") from error
        except OSError as error:
            raise CannotRun(f"no answer ({error})") from error
        return body

    def wait(self, ids: Any) -> None:
        """Wait until the server answers a request for ids.

        Raises:
            CannotRun: the server ended, or took too long.

        """
        until = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.ports.http), 1).close()
                try:
                    self.ask(ids)
                    self.ready = True
                    return
                except CannotRun:
                    if time.monotonic() > until:
                        raise
            if self.process.poll() is not None:
                raise CannotRun(f"it ended with {self.process.returncode}")
            if time.monotonic() > until:
                raise CannotRun("it does not listen")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and its child processes."""
        family = descendants(self.process.pid)
        self._tell(signal.SIGCONT)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for pid in family:  # some children outlive their parent
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _tell(self, number: signal.Signals) -> None:
        for pid in descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def started(name: str, headers: Mapping[str, str] = MappingProxyType({})) -> Iterator[RunningPeer]:
    """Install a server, start it on one core, and wait until it answers requests with `headers`; yield it paused.

    Raises:
        CannotRun: the server cannot be installed or started.

    """
    server = SERVERS[name]
    python = install(name, server.requirements, server.python) if server.requirements else Path(sys.executable)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("wb"))
        ports = Ports(*(free_port() for _ in Ports._fields))
        command = ["taskset", "-c", SERVER_CORE, *server.start(python, ports, folder)]
        of_their_own = {"PYTHONPATH": str(HANDLERS)} if server.requirements else {}
        quiet = {"BENTOML_DO_NOT_TRACK": "True", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        environment = os.environ | {"GRAPH": str(GRAPH.resolve())} | quiet | of_their_own
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
        running = RunningPeer(server, process, ports, headers)
        stack.callback(running.stop)
        try:
            with running.awake():
                running.wait(np.zeros((1, 1), np.int64))
        except CannotRun as error:
            said = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise CannotRun(f"{error}; it said: {said[-1] if said else 'nothing'}") from error
        yield running


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, ()))
    return found
