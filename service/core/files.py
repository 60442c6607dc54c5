"""How a file of an artifact is opened: a regular file of the artifact's own, and no more of it than is expected."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from preblock.service.core.errors import ArtifactError

FileSignature = tuple[int, int, int, int, int]
"""The stamp of a file in its file system; it changes with the file."""


def stamp_of(status: os.stat_result) -> FileSignature:
    """Return device, inode, size, and the times of the last change of content and of status, in nanoseconds."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def open_file(file: Path) -> BufferedReader:
    """Open `file` to read.

    Raises:
        ArtifactError: it is a link, has another name somewhere, or is no regular file; or it cannot be opened.

    """
    try:
        _check(file.name, os.lstat(file))  # before the open: opening a device or FIFO may have an effect
        # A FIFO or link put in its place now is detected, and blocks nothing.
        stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise ArtifactError(file.name, error.strerror or "an unreadable file", "a readable file") from error
    try:
        _check(file.name, os.fstat(stream.fileno()))
    except ArtifactError:
        stream.close()
        raise
    return stream


def read_file(file: Path, most: int) -> bytes:
    """Return the content of `file`.

    Raises:
        ArtifactError: as `open_file`, or it is longer than `most` bytes.

    """
    with open_file(file) as stream:
        try:
            content = stream.read(most + 1)
        except OSError as error:
            raise ArtifactError(file.name, error.strerror or "an unreadable file", "a readable file") from error
    if len(content) > most:
        raise ArtifactError(file.name, f"more than {most} bytes", f"at most {most} bytes")
    return content


def _check(name: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise ArtifactError(name, "a symbolic link", "a regular file")
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(name, "a folder or device", "a regular file")
    if status.st_nlink > 1:
        raise ArtifactError(name, f"{status.st_nlink} hard links", "a file with this one name")
