"""Reading the files of an artifact or a checkpoint: regular files only, up to an expected size."""

import errno
import os
import stat
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from preblock.service.core.errors import ArtifactError, PreblockError, Unavailable

SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Numbers of errors for lack of descriptors or memory. The same call may succeed later."""
FileSignature = tuple[int, int, int, int, int]
"""Identity and version of a file in its file system; it changes with the file."""


def signature_of(status: os.stat_result) -> FileSignature:
    """Return device, inode, size, and the times of the last change of content and of status, in nanoseconds."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_inside(target: Path, folders: Sequence[Path]) -> bool:
    """Return whether a resolved path is in one of `folders`, or in the hub cache around one.

    A hub cache is a folder `models--owner--name`, whose folders `snapshots/<commit>` have links into `blobs`. All of it
    counts as inside.
    """
    for folder in folders:
        place = Path(os.path.realpath(folder))
        caches = (above.parent for above in (place, *place.parents) if above.name == "snapshots")
        hub_caches = (cache for cache in caches if cache.name.startswith("models--"))
        if any(target.is_relative_to(root) for root in (place, *hub_caches)):
            return True
    return False


def open_file(file: Path) -> BufferedReader:
    """Open `file` to read.

    Raises:
        ArtifactError: it is a link out of its folder and its hub cache, is no regular file, or cannot be opened.
        Unavailable: the process lacks descriptors or memory.

    """
    try:
        target = Path(os.path.realpath(file, strict=True))
        if not is_inside(target, [file.parent]):
            expected = "a file in its folder or its hub cache"
            message = f"{file.name} is a link to {target}, expected {expected}"
            raise ArtifactError(file.name, f"a link to {target}", expected, message=message)
        _check(file.name, os.lstat(target))  # first, because opening a device or FIFO may have an effect
        # These flags detect a link or FIFO that has replaced the file since, without blocking.
        stream = os.fdopen(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise unreadable(file.name, error) from error
    try:
        _check(file.name, os.fstat(stream.fileno()))
    except ArtifactError:
        stream.close()
        raise
    return stream


def read_file(file: Path, max_bytes: int) -> bytes:
    """Return the content of `file`.

    Raises:
        ArtifactError: as `open_file`, or it is longer than `max_bytes`.
        Unavailable: as `open_file`.

    """
    with open_file(file) as stream:
        try:
            content = stream.read(max_bytes + 1)
        except OSError as error:
            raise unreadable(file.name, error) from error
    if len(content) > max_bytes:
        raise ArtifactError(file.name, f"more than {max_bytes} bytes", f"at most {max_bytes} bytes")
    return content


def unreadable(name: str, error: OSError) -> PreblockError:
    """Return the error for a file that the system cannot read: Unavailable for lack of descriptors or memory."""
    reason = (error.strerror or "unknown reason").lower()
    message = f"{name} cannot be read: {reason}"
    if error.errno in SCARCE:
        return Unavailable(name, reason, "free descriptors and memory", message=message)
    return ArtifactError(name, reason, "a readable file", message=message)


def _check(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(name, "a folder or device", "a regular file")
