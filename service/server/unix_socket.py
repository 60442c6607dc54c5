"""Unix domain sockets to listen on. The file of a dead server is replaced; the file of a live one is an error."""

import errno
import os
import socket
import stat
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from preblock.service.core.errors import Invalid

MAX_PATH_BYTES = 95
"""macOS allows 103 bytes and Linux 107; the name during the start is 7 longer."""


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
