"""Cache of the SHA-256 of files between runs, to read a large file once."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from preblock.service.artifacts import io
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import open_file, signature_of

CACHE_FILE = "checksums.json"
MAX_FILES = 4096
"""The least recently used file leaves a full cache."""
MAX_CACHE_BYTES = 2**20
RECENT_NS = 2 * 10**9
"""A file changed within this time may change again with the same times, because file systems round them."""


class Checksums:
    """SHA-256 of files by their signature (`files.signature_of`). A broken cache file only costs time.

    Args:
        folder: of the cache file, created if missing; None disables the cache.

    """

    def __init__(self, folder: Path | None) -> None:
        self._folder: Path | None = None
        with suppress(RuntimeError):  # the user has no home folder
            self._folder = folder and folder.expanduser()
        self._known = self._read()
        self._new: dict[str, str] = {}

    def sha256(self, stream: BufferedReader, digest: Callable[[BufferedReader], str] | None = None) -> str:
        """Return the SHA-256 of the open file `stream`, in hexadecimal. `digest` computes an unknown one, if given."""
        now, status = time.time_ns(), os.fstat(stream.fileno())
        key = ":".join(map(str, signature_of(status)))
        found = self._known.pop(key, None)
        if found is None:
            found = (digest or io.sha256)(stream)
            recent = now - max(status.st_mtime_ns, status.st_ctime_ns) < RECENT_NS
            if recent or signature_of(os.fstat(stream.fileno())) != signature_of(status):
                return found
            self._new[key] = found
        self._known[key] = found
        return found

    def save(self) -> None:
        """Add the new hashes to the cache file, and keep the hashes of other processes."""
        if self._folder is None or not self._new:
            return
        others = {key: value for key, value in self._read().items() if key not in self._known}
        kept = others | self._known  # in the order of their last use
        text = json.dumps(dict(list(kept.items())[-MAX_FILES:]), indent=0)
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=self._folder, ignore_cleanup_errors=True) as draft:
                file = Path(draft) / CACHE_FILE
                file.touch(0o600)
                file.write_text(text, encoding="ascii")
                file.replace(self._folder / CACHE_FILE)
            self._new.clear()

    def _read(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            with open_file(self._folder / CACHE_FILE) as stream:
                status = os.fstat(stream.fileno())
                # Another user with write access could make any file pass.
                if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_size > MAX_CACHE_BYTES:
                    return {}
                found = json.loads(stream.read(MAX_CACHE_BYTES))
        except (ArtifactError, OSError, ValueError, RecursionError):
            return {}
        entries = found.items() if isinstance(found, dict) else ()
        return {
            key: value
            for key, value in entries
            if isinstance(value, str) and re.fullmatch(r"[0-9:-]+", key) and re.fullmatch(r"[0-9a-f]{64}", value)
        }
