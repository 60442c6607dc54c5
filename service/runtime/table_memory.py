"""Mapped files of large tables, and a budget for their resident pages.

A table file is mapped shared and read-only, so that all processes share its pages in the page cache. Linux maps a whole
folio of the page cache at the first access to one of its rows: up to 2 MiB. So random rows make a whole table resident.
Above the budget, the process releases the pages of all tables (madvise(2), MADV_DONTNEED). They stay in the page cache.
"""

import mmap
import os
from pathlib import Path
from threading import Lock
from weakref import WeakSet

from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import FileSignature, signature_of
from preblock.service.core.types import Int64

FOLIO_BYTES = 2**21
"""Most bytes that become resident at the access to a row."""
MIN_BUDGET_BYTES = 64 * FOLIO_BYTES
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class TableMemory:
    """The mapped tables of a process.

    Args:
        budget_bytes: most resident bytes of all tables, at least `MIN_BUDGET_BYTES`; default None: no limit.
        warm_up_ids: token ids, int64 (R, L), whose rows are read before a model is ready; default None.

    Attributes:
        max_rows: most rows to gather after one `reserve`; None without a budget.

    """

    def __init__(self, budget_bytes: int | None = None, warm_up_ids: Int64 | None = None) -> None:
        self.warm_up_ids = warm_up_ids
        self.max_rows = None if budget_bytes is None else budget_bytes // FOLIO_BYTES // 4
        self._budget, self._room = budget_bytes, 0
        self._maps: WeakSet[mmap.mmap] = WeakSet()
        self._lock = Lock()
        self._without_tables = 0
        self._rows = self._bytes = 0

    def map(self, file: Path, expected: FileSignature | None = None) -> memoryview:
        """Map a file, shared and read-only.

        Args:
            file: the file.
            expected: its signature when it was checked; default None: not compared.

        Raises:
            ArtifactError: the file cannot be opened, is empty, or has changed since the check.

        """
        try:
            with file.open("rb") as stream:
                if expected is not None and signature_of(os.fstat(stream.fileno())) != expected:
                    message = f"{file} changed while it was opened"
                    raise ArtifactError(file.name, "a change while it was opened", "the checked file", message=message)
                mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ArtifactError(file.name, f"a file that cannot be mapped ({error})", "a readable file") from error
        mapped.madvise(mmap.MADV_RANDOM)  # a cold row reads its own pages alone, not 128 kB
        with self._lock:
            if not self._maps:
                self._without_tables = read_file_pages()
            self._maps.add(mapped)
        return memoryview(mapped)

    def reserve(self, rows: int, row_bytes: int) -> None:
        """Count rows that are gathered next. If they could exceed the budget, advise away the pages of all tables."""
        with self._lock:
            self._rows += rows
            self._bytes += rows * row_bytes
            if self._budget is None:
                return
            wanted = rows * FOLIO_BYTES
            self._room -= wanted
            if self._room >= 0:
                return
            # The pages are counted only if the rows since the last count could have used up the budget.
            self._room = self._budget - self.resident_bytes - wanted
            if self._room < 0:
                for mapped in self._maps:
                    mapped.madvise(mmap.MADV_DONTNEED)
                self._without_tables = read_file_pages()
                self._room = self._budget - wanted

    @property
    def resident_bytes(self) -> int:
        """Growth of the resident file pages of this process since its tables had none; 0 without tables."""
        return max(0, read_file_pages() - self._without_tables) if self._maps else 0

    def take_use(self) -> tuple[int, int, int]:
        """Return the rows and bytes gathered since the last call, and the resident bytes of the tables."""
        with self._lock:
            rows, size = self._rows, self._bytes
            self._rows = self._bytes = 0
            return rows, size, self.resident_bytes


def read_file_pages() -> int:
    """Return the bytes of resident file pages of this process (proc(5): RssFile and RssShmem)."""
    with open("/proc/self/statm", "rb", buffering=0) as stream:  # noqa: PTH123 - a Path takes twice the time
        return int(stream.read(128).split()[2]) * PAGE_BYTES
