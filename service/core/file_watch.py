"""File watcher, for reloads without a restart."""

import time
from pathlib import Path

from preblock.service.core.files import FileSignature, signature_of

POLL_INTERVAL_SECONDS = 1.0
"""Minimum time between two polls of a file."""


class FileWatcher:
    """Polls files for changes, when `changed` is called.

    Args:
        files: may be missing for a while.

    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._signatures = [_read_signature(file) for file in files]
        self._polled = time.monotonic()

    def changed(self) -> bool:
        """Return whether a file has changed since the last poll; False within a second of it."""
        if time.monotonic() - self._polled < POLL_INTERVAL_SECONDS:
            return False
        self._polled = time.monotonic()
        before, self._signatures = self._signatures, [_read_signature(file) for file in self._files]
        return self._signatures != before


def _read_signature(file: Path) -> FileSignature | None:
    try:
        return signature_of(file.stat())
    except OSError:
        return None
