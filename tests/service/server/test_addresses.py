"""Addresses and paths where no server can listen, on real sockets."""

import errno
import os
import socket
from pathlib import Path

import pytest

from preblock.service.core.errors import Invalid
from preblock.service.server.addresses import MAX_PATH_BYTES, UnixListener, _unusable, bind, check_unix
from tests.support.servers import in_use


def refusal(host: str, port: int) -> str:
    with pytest.raises(Invalid) as refused:
        bind("port", host, port)
    return str(refused.value)


def test_unusable_address_is_named_with_its_reason() -> None:
    with bind("host", "127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal("127.0.0.1", port) == in_use(port)
    assert refusal("192.0.2.1", 0) == "192.0.2.1 is not an address of this machine"  # RFC 5737: of nobody
    assert refusal("no.invalid", 0).startswith("the host no.invalid is unknown: ")  # RFC 6761
    assert refusal("a" * 64 + ".invalid", 0).endswith(" is unknown: no name of a host")  # a label has 63 bytes at most


def test_unusable_path_is_named_with_its_reason(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(Invalid) as refused:
            check_unix("uds", path)
        return str(refused.value)

    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    long = tmp_path / ("x" * MAX_PATH_BYTES)
    assert refusal(tmp_path / "file").endswith("exists, and is not a socket")
    assert refusal(tmp_path / "none/a").endswith(f"{tmp_path}/none is not a folder")
    assert refusal(tmp_path / "loop/a").startswith(f"the socket {tmp_path}/loop/a cannot be used: too many levels")
    assert "the path of a Unix socket has at most" in refusal(long)
    for backlog in (0, 8):  # with the backlog 0 one waiting connection fills the queue
        path = tmp_path / f"live{backlog}"
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(os.fspath(path))
            server.listen(backlog)
            client.connect(os.fspath(path))
            assert refusal(path) == f"the socket {path} is already in use"
    check_unix("uds", path)  # a dead one is free


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "port 80 on ::1 needs more rights than this user has; choose a port of 1024 or more"),
        (errno.EAFNOSUPPORT, "port 80 on ::1 cannot be used: Address family not supported by protocol"),
    ],
)
def test_refusal_by_the_system_is_named(number: int, reason: str) -> None:
    """Whether this system refuses a port depends on its settings."""
    assert str(_unusable("port", "::1", 80, OSError(number, os.strerror(number)))) == reason


def test_path_that_cannot_be_bound_or_taken_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"^the socket /proc/a cannot be used: "):
        UnixListener("uds", Path("/proc/a"))
    path = tmp_path / "a"
    with UnixListener("uds", path) as listener:
        next(tmp_path.iterdir()).unlink()
        with pytest.raises(Invalid, match=rf"^the socket {path} cannot be used: no such file or directory$"):
            listener.listen(1)
