"""Servers for tests: `serve` starts a real process, `live_server` a thread of this one."""

import os
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import uvicorn

from tests.support.paths import PREBLOCK


@dataclass(frozen=True)
class Server:
    """A running `preblock serve`."""

    address: str
    grpc: str
    process: subprocess.Popen[str]
    banner: str

    @property
    def socket(self) -> str:
        """Return the address for WebSockets."""
        return self.address.replace("http", "ws", 1)


def free_port() -> int:
    """Return a port that nobody listens on, below the range that the kernel assigns from."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def read_banner(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the output of a server until it serves, and the address in it; "" where the process ended first."""
    assert process.stdout is not None
    banner = ""
    for line in process.stdout:
        banner += line
        if line.startswith("  curl"):
            break
    found = re.search(r"https?://\S+", banner)
    return banner, found[0] if found else ""


@contextmanager
def serve(repository: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Serve `repository` from a process on free ports, and check that the process ends without an error."""
    grpc_port = free_port()
    arguments = ["--repository", str(repository), "--port", "0", "--grpc-port", str(grpc_port), *options]
    with (
        tempfile.TemporaryFile("w+") as errors,  # a full pipe without a reader would stop the server
        subprocess.Popen(
            [PREBLOCK, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        ) as process,
    ):
        try:
            banner, address = read_banner(process)
            if address:
                yield Server(address, f"127.0.0.1:{grpc_port}", process, banner)
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
def live_server(config: uvicorn.Config) -> Iterator[int]:
    """Run uvicorn in a thread, so that a test can watch the objects of the server, and return its port."""
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
