"""HAProxy as a process of a test."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.waiting import wait_until

needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy here")


@contextmanager
def haproxy(settings: str, port: int, folder: Path) -> Iterator[str]:
    """Run HAProxy with a settings file that binds `port`, and return its address."""
    file = folder / "haproxy.cfg"
    file.write_text(settings)
    with (
        (folder / "haproxy.log").open("w") as log,
        subprocess.Popen(["haproxy", "-db", "-f", file], stdout=log) as process,
    ):
        try:
            wait_until(lambda: _listens(port, process))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def deployed_settings(addresses: Sequence[str], port: int) -> str:
    """Return the settings of `deploy/` for servers at known addresses, without gRPC."""
    settings = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    replicas = [f"    server replica{i} {address.removeprefix('http://')}" for i, address in enumerate(addresses)]
    edits = {
        r"^frontend grpc\n.*": "",
        r"^resolvers docker\n(?: .*\n)+": "",
        r"^    server-template .*$": "\n".join(replicas),
        r"\b127\.0\.0\.1:9999\b": f"127.0.0.1:{free_port()}",
        r"^    bind :8080$": f"    bind 127.0.0.1:{port}",
    }
    for pattern, replacement in edits.items():
        flags = re.MULTILINE | re.DOTALL if "grpc" in pattern else re.MULTILINE
        settings, count = re.subn(pattern, replacement, settings, flags=flags)
        assert count == 1, pattern
    return settings


def _listens(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "HAProxy rejected its settings"
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
