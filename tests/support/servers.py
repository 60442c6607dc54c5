"""Servers for tests: `serve` starts a real process, `live_server` a thread of this one."""

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import httpx
import uvicorn

from tests.support.paths import PREBLOCK, ROOT
from tests.support.waiting import wait_until

_APPLICATION = "tests.support.asgi_app:create"
ASGI_SERVERS = {
    "uvicorn": ["uvicorn", "--factory", "--http", "httptools", "--ws", "websockets-sansio", _APPLICATION],
    "uvicorn-h11": ["uvicorn", "--factory", "--http", "h11", "--ws", "wsproto", _APPLICATION],
    "hypercorn": ["hypercorn", f"{_APPLICATION}()"],
}
"""Modules to run the application, with their arguments."""


LOADING_HINT = "a new export is served after a restart, or by a server with --model-control poll"
"""End of the error of an unknown model or version, by default."""


@dataclass(frozen=True)
class Server:
    """A running `preblock serve`."""

    address: str
    grpc: str
    pid: int
    banner: str

    @property
    def socket(self) -> str:
        """Return the address for WebSockets."""
        return self.address.replace("http", "ws", 1)


@dataclass(frozen=True)
class OwnServer(Server):
    """A server of one test or module, which may stop it."""

    process: subprocess.Popen[str]


def free_port() -> int:
    """Return an unused port below the kernel's range of ephemeral ports."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def in_use(port: int | str, option: str = "port") -> str:
    """Return the message of a server that is to listen at a used port of 127.0.0.1."""
    return f"port {port} on 127.0.0.1 is already in use; choose another by --{option}, or 0 for any free one"


def read_banner(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the output of a server until it serves, and the address in it; "" where the process ended first."""
    assert process.stdout is not None
    banner = ""
    for line in process.stdout:
        banner += line
        if address_in(banner):
            break
    return banner, address_in(banner)


def address_in(banner: str) -> str:
    """Return the address in the output of a server that serves; "" before."""
    found = re.search(r"(https?(?:\+unix)?://\S+).*\n  curl .*\n", banner, re.DOTALL)
    return found[1] if found else ""


def wait_for_answer(address: str) -> str:
    """Return the address of a server without a banner, once it serves."""
    wait_until(lambda: is_ready(address), 60)
    return address


def serve_command(repository: Path, *options: str) -> tuple[list[str], str]:
    """Return the command of a server on free ports, and its gRPC address."""
    port = free_port()
    arguments = ["--repository", str(repository), "--port", "0", "--grpc-port", str(port), *options]
    return [PREBLOCK, "serve", *arguments], f"127.0.0.1:{port}"


@contextmanager
def serve(repository: Path, *options: str, **environment: str) -> Iterator[OwnServer]:
    """Serve `repository` from a process on free ports, and check its end for errors."""
    command, grpc = serve_command(repository, *options)
    with (
        tempfile.TemporaryFile("w+") as errors,  # a full pipe without a reader would stop the server
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment
        ) as process,
    ):
        try:
            banner, address = read_banner(process)
            if address:
                yield OwnServer(address, grpc, process.pid, banner, process)
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
        errors.seek(0)
        written = errors.read()
        assert address, f"no address; standard error: {written}"
        assert process.returncode == 0, written
        assert "Traceback" not in written, written


@contextmanager
def serve_replicas(repository: Path, count: int) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Serve `repository` from `count` processes, by address. A test may kill them; their ends are not checked."""
    command = [PREBLOCK, "serve", "--repository", str(repository), "--port", "0", "--log-level", "warning"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield {read_banner(process)[1]: process for process in started}
    finally:
        for process in started:
            process.kill()
            process.communicate()


def asgi_command(name: str) -> tuple[list[str], str]:
    """Return the command of one of ASGI_SERVERS on a free port, and its address."""
    port = str(free_port())
    bind = ["--bind", f"127.0.0.1:{port}"] if name == "hypercorn" else ["--port", port]
    return [sys.executable, "-m", *ASGI_SERVERS[name], *bind], f"http://127.0.0.1:{port}"


def is_ready(address: str) -> bool:
    """Return whether a server at this address serves."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{address}/readyz").status_code == 200
    return False


@contextmanager
def serve_asgi(name: str, repository: Path, **environment: str) -> Iterator[OwnServer]:
    """Serve `repository` with one of ASGI_SERVERS, without gRPC, and check its log for errors."""
    command, address = asgi_command(name)
    environment = {**os.environ, **environment, "PREBLOCK_REPOSITORY": str(repository)}

    def started() -> bool:
        assert process.poll() is None
        return is_ready(address)

    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors, text=True
        ) as process,
    ):
        try:
            wait_until(started, 60)
            yield OwnServer(address, "", process.pid, "", process)
        finally:
            process.terminate()
            process.wait(60)
        errors.seek(0)
        written = errors.read()
        assert "Traceback" not in written, written


@contextmanager
def live_server(config: uvicorn.Config) -> Iterator[int]:
    """Run uvicorn in a thread, for access to the objects of the server, and return its port."""
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
