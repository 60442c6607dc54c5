"""Files that are read again when they change, without a restart."""

import time
from pathlib import Path

from preblock.service.core.files import FileSignature, stamp_of

POLL_INTERVAL_SECONDS = 1.0
"""Least time between two looks at whether a file has changed."""


class FileWatcher:
    """Watches files; they are looked at on request.

    Args:
        files: may change, or be missing for a while.

    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._stamps()
        self._looked = time.monotonic()

    def changed(self) -> bool:
        """Return whether a file has changed since the last call; always False within a second of it."""
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
