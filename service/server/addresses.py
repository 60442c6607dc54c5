"""The addresses of HTTP and gRPC: TCP ports and Unix sockets, checked and bound before the models are opened.

The file of a dead server's Unix socket is replaced; the file of a live server is an error.
"""

import errno
import hashlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Self
from urllib.parse import quote

from preblock.service.api.http.origins import AllowedHosts, is_loopback
from preblock.service.core.errors import Invalid
from preblock.service.core.settings import Settings, split_list

BACKLOG = 2048
MAX_PATH_BYTES = 95
"""macOS allows 103 bytes and Linux 107; the name during the start is 7 longer."""


@dataclass(frozen=True)
class Bound:
    """A bound socket, the function to listen, and the URL."""

    socket: socket.socket
    listen: Callable[[], None]
    url: str


@contextmanager
def bind_http(settings: Settings) -> Iterator[Bound]:
    """Bind the socket of HTTP, and release it when the block ends."""
    scheme = "https" if settings.tls_cert_file else "http"
    if settings.uds is not None:
        path, early = settings.uds.absolute(), list[int]()
        previous = signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
        with UnixListener("uds", path) as unix:
            signal.signal(signal.SIGTERM, previous)
            if early:  # before the block could remove the file
                sys.exit()

            def listen_at_path() -> None:
                with _hold_path("uds", path):  # between its check and its file another server could begin
                    unix.listen(BACKLOG)

            yield Bound(unix.socket, listen_at_path, f"{scheme}+unix://{quote(os.fsencode(path), safe='')}")
        return
    with bind("port", settings.host, settings.port) as listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            # Drops a client that does not read, and its unsent bytes.
            idle_ms = min(1000 * settings.stream_idle_timeout_seconds, 2**31 - 1)  # the largest option, 24 days
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, idle_ms)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        port = listener.getsockname()[1]

        def listen() -> None:
            try:
                listener.listen(BACKLOG)
            except OSError as error:
                raise _unusable("port", settings.host, port, error) from error

        yield Bound(listener, listen, f"{scheme}://{host}:{port}")


def allowed_hosts(settings: Settings, listener: socket.socket) -> AllowedHosts:
    """Return the hosts that requests to a listener may address.

    By default these are loopback names at a loopback address, and any name elsewhere. A Unix socket allows any, because
    web pages cannot reach it.
    """
    if listener.family == socket.AF_UNIX:
        return AllowedHosts()
    names = split_list(settings.allowed_hosts)
    if is_loopback(listener.getsockname()[0]):
        return AllowedHosts([settings.host, *names])
    return AllowedHosts(names or None)


@contextmanager
def hold_grpc_address(settings: Settings) -> Iterator[Settings]:
    """Keep the address of gRPC from other servers in the block: gRPC would share or replace it without an error.

    The block gets the settings, with a free port in place of the port 0.

    Raises:
        Invalid: the address cannot be used.

    """
    with ExitStack() as stack:
        if settings.grpc_uds is not None:
            stack.enter_context(_hold_path("grpc-uds", _check_grpc_path(settings, settings.grpc_uds.absolute())))
        elif settings.grpc_port is not None:
            if settings.uds is None and settings.grpc_port == settings.port != 0:
                message = f"--port and --grpc-port are both {settings.port}; each needs its own port"
                raise Invalid("grpc-port", str(settings.grpc_port), "another port than --port", message=message)
            probe = stack.enter_context(bind("grpc-port", settings.host, settings.grpc_port))
            host, port, *_ = probe.getsockname()
            if sys.platform != "linux":  # Linux lets gRPC bind beside it, since it does not listen
                probe.close()
            stack.enter_context(_hold(f"{host}:{port}", partial(_unusable, "grpc-port", settings.host, port)))
            if settings.grpc_port == 0:
                settings = settings.with_grpc_port(port)
        yield settings


@contextmanager
def _hold_path(field: str, path: Path) -> Iterator[None]:
    """Keep the path of a socket from other servers in the block."""
    folder = path.parent.stat()  # not its name, because containers may have equal names
    with _hold(f"{folder.st_dev}:{folder.st_ino}/{path.name}", partial(unusable_path, field, path)):
        yield


@contextmanager
def _hold(place: str, unusable: Callable[[OSError], Invalid]) -> Iterator[None]:
    """Hold a lock of this name in the block, also while the server starts; `unusable` makes the error."""
    with socket.socket(socket.AF_UNIX) as lock:
        if sys.platform == "linux":  # the kernel frees an abstract name at the end of the process (unix(7))
            try:
                lock.bind(b"\0preblock-" + hashlib.sha256(os.fsencode(place)).digest())
            except OSError as error:
                raise unusable(error) from error
        yield


def _check_grpc_path(settings: Settings, path: Path) -> Path:
    """Return the path of gRPC's socket, if a server may listen there."""
    if settings.workers > 1:
        message = (
            f"--grpc-uds works with one worker, and workers is {settings.workers}: gRPC cannot share a Unix socket "
            "between processes; set --workers 1, or --grpc-port"
        )
        raise Invalid("grpc-uds", str(settings.grpc_uds), "one worker", message=message)
    if settings.uds is not None and path == settings.uds.absolute():
        message = f"--uds and --grpc-uds are both {path}; each needs its own socket"
        raise Invalid("grpc-uds", str(path), "another path than --uds", message=message)
    check_unix("grpc-uds", path)
    return path


def bind(field: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. It refuses connections until a server listens.

    Raises:
        Invalid: the address cannot be used.

    """
    with ExitStack() as stack:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = stack.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise _unusable(field, host, port, error) from error
        stack.pop_all()
        return listener


def _unusable(field: str, host: str, port: int, error: OSError | UnicodeError) -> Invalid:
    """Return the error for an address that cannot be bound."""
    if isinstance(error, UnicodeError | socket.gaierror):
        message = f"the host {host} is unknown: {str(getattr(error, 'strerror', 'no name of a host')).lower()}"
    elif error.errno == errno.EADDRINUSE:
        message = f"port {port} on {host} is already in use; choose another by --{field}, or 0 for any free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        message = f"{host} is not an address of this machine"
    elif error.errno == errno.EACCES:
        message = f"port {port} on {host} needs more rights than this user has; choose a port of 1024 or more"
    else:
        message = f"port {port} on {host} cannot be used: {error.strerror}"
    return Invalid(field, f"{host}:{port}", "a free address of this machine", message=message)


def check_unix(field: str, path: Path) -> None:
    """Check a path for a server to listen at.

    Raises:
        Invalid: the path is too long, a live server has it, or it cannot be used; `field` names the setting.

    """
    name = str(path)
    size, expected = len(os.fsencode(path)), f"at most {MAX_PATH_BYTES} bytes"
    if size > MAX_PATH_BYTES:
        message = f"--{field}: the path {name} has {size} bytes; the path of a Unix socket has {expected}"
        raise Invalid(field, name, expected, message=message)
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            message = f"{name} exists, and is not a socket"
            raise Invalid(field, name, "a socket or a free path", message=message)
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        if not os.access(path.parent, os.W_OK | os.X_OK):
            state = "may not be written by this user" if path.parent.is_dir() else "is not a folder"
            message = f"{name} cannot be used: {path.parent} {state}"
            raise Invalid(field, name, "a path in a writable folder", message=message) from None
        return
    except BlockingIOError:  # its queue is full
        pass
    except OSError as error:
        raise unusable_path(field, path, error) from error
    raise unusable_path(field, path, OSError(errno.EADDRINUSE, ""))


class UnixListener:
    """A socket for `path`, to close by `with`.

    Its file has a temporary name until the socket listens. A socket at `path` without a listener therefore belongs to a
    dead server, never to a starting one.

    Args:
        field: the setting, for messages.
        path: absolute. Its mode follows the umask of this process.

    Raises:
        Invalid: as `check_unix`.

    """

    def __init__(self, field: str, path: Path) -> None:
        check_unix(field, path)
        self.socket = socket.socket(socket.AF_UNIX)
        self._field, self._path = field, path
        self._first_path = path.with_name(f"{path.name}.{token_hex(3)}")
        try:
            self.socket.bind(str(self._first_path))
            self._inode = self._first_path.lstat().st_ino
        except OSError as error:
            self.socket.close()
            raise unusable_path(field, path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Close the socket and remove its file, unless another server has replaced it."""
        self.socket.close()
        for path in (self._first_path, self._path):
            try:
                if path.lstat().st_ino == self._inode:
                    path.unlink()
            except OSError:  # removed, or the folder is
                continue

    def listen(self, backlog: int) -> None:
        """Accept connections at the path.

        Raises:
            Invalid: another server listens there by now.

        """
        check_unix(self._field, self._path)
        self.socket.listen(backlog)
        try:
            self._first_path.replace(self._path)
        except OSError as error:
            raise unusable_path(self._field, self._path, error) from error


def unusable_path(field: str, path: Path, error: OSError) -> Invalid:
    """Return the error for a path where no socket can listen."""
    if error.errno == errno.EADDRINUSE:
        message = f"the socket {path} is already in use"
    else:
        message = f"the socket {path} cannot be used: {str(error.strerror or error).lower()}"
    return Invalid(field, str(path), "a path without a live server", message=message)
