"""Gathers the stored bytes of rows of large tables: by `_stored_rows.c`, or by NumPy if that was not built.

Letters: T tokens, N tables, H rows of a token in each table.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.types import Int64
from preblock.service.runtime.fused_embedding import BUILT, guard_mapped_files
from preblock.service.runtime.table_memory import TableMemory

if BUILT:
    from preblock.service.runtime._kernels import gather_rows, open_table

Bytes = NDArray[np.uint8]
Parts = Sequence[memoryview]
"""The rows of a table, in one buffer or in several."""


class Gather(Protocol):
    """Copies rows of tables with one row size."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        """Open the tables."""

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids`, (T, N, H), into `out`, (T, N, H, row bytes); both are contiguous.

        Raises:
            IndexError: an id has no row.
            BufferError: a file of the tables has become shorter.

        """


class KernelGather:
    """Gathers by `_stored_rows.c`; see `Gather`."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        guard_mapped_files()
        self._tables = tuple(open_table(tuple(parts), row_bytes) for parts in tables)

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids` into `out`."""
        gather_rows(ids, self._tables, out, ids.shape[2])


class NumpyGather:
    """Gathers by NumPy; see `Gather`. A file that becomes shorter is fatal."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        self._tables: list[list[Bytes]] = [
            [np.frombuffer(part, np.uint8).reshape(-1, row_bytes) for part in parts] for parts in tables
        ]

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids` into `out`."""
        for layer, parts in enumerate(self._tables):
            wanted, found, first = ids[:, layer], out[:, layer], 0
            rows = sum(map(len, parts))
            outside = wanted.view(np.uint64) >= rows  # as unsigned numbers, negative ones are large
            if outside.any():
                raise IndexError(f"id: got {int(wanted[outside][0])}, expected 0 to {rows - 1}")
            for part in parts:
                here = (wanted >= first) & (wanted < first + len(part))
                found[here] = part[wanted[here] - first]
                first += len(part)


GATHER: type[Gather] = KernelGather if BUILT else NumpyGather


class StoredRows:
    """Rows of the tables of all layers, of one type and width.

    Args:
        tables: the rows of each layer.
        dtype: of the stored numbers.
        width: numbers in a row.
        memory: counts the rows, and has the budget of resident pages.

    """

    def __init__(self, tables: Sequence[Parts], dtype: np.dtype[Any], width: int, memory: TableMemory) -> None:
        self.dtype, self.width = dtype, width
        self._row_bytes = width * dtype.itemsize
        self._gather, self._memory = GATHER(tables, self._row_bytes), memory

    def gather(self, ids: Int64) -> NDArray[Any]:
        """Return the stored rows of `ids`, (T, N, H), as an array (T, N, H * width) of the stored type.

        Raises:
            IndexError: an id has no row.
            BufferError: a file of the tables has become shorter.

        """
        # Repeated rows are copied again: np.unique alone takes longer than the whole gather, however many are repeated.
        tokens, layers, heads = ids.shape
        rows: Bytes = np.empty((*ids.shape, self._row_bytes), np.uint8)
        most = tokens if self._memory.max_rows is None else max(1, self._memory.max_rows // (layers * heads))
        for begin in range(0, tokens, max(1, most)):
            part = ids[begin : begin + most]
            self._memory.reserve(part.size, self._row_bytes)
            self._gather.run(part, rows[begin : begin + most])
        return rows.view(self.dtype).reshape(tokens, layers, heads * self.width)
