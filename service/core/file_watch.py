"""File watcher, for reloads without a restart."""

import ssl
import stat
import time
from pathlib import Path

from preblock.service.core.files import FileSignature, signature_of

POLL_INTERVAL_SECONDS = 1.0
"""Minimum time between two polls of a file."""


class FileWatcher:
    """Polls regular files for changes, when `changed` is called.

    Args:
        files: may be missing for a while. A pipe or device never counts as changed.

    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._signatures = [_read_signature(file) for file in files]
        self._polled = time.monotonic()
        self._rejection = ""
        self._repeats = False

    def changed(self) -> bool:
        """Return whether a file has changed since the last poll, or could not be read; False within a second of it."""
        if time.monotonic() - self._polled < POLL_INTERVAL_SECONDS:
            return False
        self._polled = time.monotonic()
        before, self._signatures = self._signatures, [_read_signature(file) for file in self._files]
        repeats, self._repeats = self._repeats, False
        if self._signatures != before:
            self._rejection = ""
            return True
        return repeats

    def reject(self, error: Exception) -> bool:
        """Take an error in the use of the changed files, and return whether to log it: it is not the last one again.

        If the system could not read a file, the next poll returns True: the same file may be readable by then.
        """
        cause = error.__cause__ or error
        self._repeats = isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
        before, self._rejection = self._rejection, str(error)
        return before != self._rejection


def _read_signature(file: Path) -> FileSignature | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return signature_of(status) if stat.S_ISREG(status.st_mode) else None
