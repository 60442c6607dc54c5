"""HAProxy as a process of a test."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


def _listens(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "HAProxy rejected its settings"
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
