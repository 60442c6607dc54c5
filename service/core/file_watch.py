"""File watcher, for reloads without a restart.

A file system may never answer, as one of a lost network drive. So a thread polls and reads the files.
"""

import asyncio
import errno
import logging
import os
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from preblock.service.core.errors import Invalid
from preblock.service.core.files import FileSignature, signature_of
from preblock.service.core.tasks import start_thread

LOG = logging.getLogger(__name__)
POLL_INTERVAL_SECONDS = 1.0
"""Time between two polls of a file."""
SLOW_SECONDS = 10.0
"""Time of a poll until the log reports it."""
Result = TypeVar("Result")


class FileWatcher:
    """Finds changes of regular files and of links to them, as Kubernetes mounts secrets.

    Args:
        title: of the files, for the log.
        kept: what the service keeps in use instead of files that are not valid, for the log.
        files: may be missing for a while.

    """

    def __init__(self, title: str, kept: str, *files: Path) -> None:
        self._title, self._kept, self._files = title, kept, files
        self._signatures = [_read_signature(file) for file in files]
        self._rejection = ""
        self._repeats = False

    def load(self, read: Callable[[], Result], report: Callable[[str, Exception], object]) -> Result | None:
        """Return the result of `read` if a file has changed, and it can be used; else None.

        For files that cannot be used, `report` gets the format of a log line and the error, once for the same error.
        """
        if not self.changed():
            return None
        try:
            return read()
        except (Invalid, OSError) as error:
            if self._rejects(error):
                report(f"{self._title} rejected, keeping the previous {self._kept}: %s", error)
            return None

    def changed(self) -> bool:
        """Return whether a file has changed since the last call, or could not be read."""
        before, self._signatures = self._signatures, [_read_signature(file) for file in self._files]
        repeats, self._repeats = self._repeats, False
        if self._signatures != before:
            self._rejection = ""
            return True
        return repeats

    def repeat(self) -> None:
        """Count the files as changed at the next poll."""
        self._repeats = True

    def _rejects(self, error: Exception) -> bool:
        """Take an error in the use of the changed files, and return whether to log it: it is not the last one again.

        If the system could not read a file, the next poll returns True: the same file may be readable by then.
        """
        cause = error.__cause__ or error
        self._repeats = isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
        before, self._rejection = self._rejection, str(error)
        return before != self._rejection


async def poll(load: Callable[[], Result | None], use: Callable[[Result], object]) -> None:
    """After a second, call `load` in a thread, and `use` with its result unless that is None.

    While `load` hangs, the service keeps its content, and the log says so after `SLOW_SECONDS`.
    """
    await asyncio.sleep(POLL_INTERVAL_SECONDS)
    loaded = asyncio.wrap_future(start_thread(load, "file-poll"))
    try:
        done, _ = await asyncio.wait((loaded,), timeout=SLOW_SECONDS)
        if not done:
            LOG.warning("a watched file gives no answer for %.0f s; its earlier content stays in use", SLOW_SECONDS)
        result = await loaded
    finally:
        loaded.cancel()  # or the thread would report to a loop that has ended
    if result is not None:
        use(result)


def check_regular(file: Path) -> None:
    """Raise OSError for a pipe, a device or a folder, whose reading may block or have an effect."""
    _check_mode(file.stat())


def read_watched(file: Path) -> bytes:
    """Return the content of a regular file, or of a link to one; never wait for the writer of a pipe.

    Raises:
        OSError: it is no regular file, or cannot be read.

    """
    check_regular(file)
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        _check_mode(os.fstat(descriptor))  # a pipe may have replaced the file since
        return stream.read()


def _check_mode(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _read_signature(file: Path) -> FileSignature | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return signature_of(status) if stat.S_ISREG(status.st_mode) else None
