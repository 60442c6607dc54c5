"""Files that are read again when they change, so that no restart is needed for another content."""

import time
from pathlib import Path

from preblock.service.core.files import FileSignature, stamp_of

POLL_INTERVAL_SECONDS = 1.0
"""Least time between two looks at whether a file has changed."""


class FileWatcher:
    """Some files, which are looked at when somebody asks.

    Args:
        files: that may change, or be missing for a while.

    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._stamps()
        self._looked = time.monotonic()

    def changed(self) -> bool:
        """Return whether one has changed since the last time; who asks again within a second is told no."""
        if time.monotonic() - self._looked < POLL_INTERVAL_SECONDS:
            return False
        self._looked = time.monotonic()
        before, self._seen = self._seen, self._stamps()
        return self._seen != before

    def _stamps(self) -> list[FileSignature | None]:
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> FileSignature | None:
    try:
        return stamp_of(file.stat())
    except OSError:
        return None
