"""Remembers the SHA-256 of files between runs: a large file is read once."""

import json
import os
import re
import tempfile
import time
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from preblock.service.artifacts import io
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import open_file, signature_of

FILE = "checksums.json"
MOST = 4096
"""Most files in the cache; the file used longest ago makes room."""
MOST_BYTES = 2**20
RECENT_NS = 2 * 10**9
"""A file that changed within this time may change once more and keep its times: file systems count coarsely."""


class Checksums:
    """The SHA-256 of files, found by the stamp of each file (`files.signature_of`).

    A broken cache file costs time and nothing else.

    Args:
        folder: of the cache file; made where it is missing. None: no cache.

    """

    def __init__(self, folder: Path | None) -> None:
        self._folder: Path | None = None
        with suppress(RuntimeError):  # this user has no home
            self._folder = folder and folder.expanduser()
        self._known = self._read()
        self._new: dict[str, str] = {}

    def sha256(self, stream: BufferedReader) -> str:
        """Return the SHA-256 of the file behind `stream`, in hexadecimal."""
        now, status = time.time_ns(), os.fstat(stream.fileno())
        key = ":".join(map(str, signature_of(status)))
        found = self._known.pop(key, None)
        if found is None:
            found = io.sha256(stream)
            recent = now - max(status.st_mtime_ns, status.st_ctime_ns) < RECENT_NS
            if recent or signature_of(os.fstat(stream.fileno())) != signature_of(status):
                return found
            self._new[key] = found
        self._known[key] = found
        return found

    def save(self) -> None:
        """Write the new hashes beside those of other processes."""
        if self._folder is None or not self._new:
            return
        kept = self._read() | self._known
        text = json.dumps(dict(list(kept.items())[-MOST:]), indent=0)
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=self._folder, ignore_cleanup_errors=True) as draft:
                file = Path(draft) / FILE
                file.touch(0o600)
                file.write_text(text, encoding="ascii")
                file.replace(self._folder / FILE)
            self._new.clear()

    def _read(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            with open_file(self._folder / FILE) as stream:
                status = os.fstat(stream.fileno())
                # Another writer of the cache could let any file pass.
                if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_size > MOST_BYTES:
                    return {}
                found = json.loads(stream.read(MOST_BYTES))
        except (ArtifactError, OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            key: value
            for key, value in found.items()
            if isinstance(value, str) and re.fullmatch(r"[0-9:-]+", key) and re.fullmatch(r"[0-9a-f]{64}", value)
        }
