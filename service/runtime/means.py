"""Means of rows of vectors: of vectors that come in chunks, and of rows of a table without a copy of each.

`_row_means.c` computes both. Without this kernel, NumPy computes the first.

Letters: B batch, T tokens, V token ids, D width.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.graphs import find_lookup
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA
from preblock.service.core.types import Int64, TokenRows
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.runner import Float32

if BUILT:
    from preblock.service.runtime._kernels import add_to_means, average_rows


class Means(Protocol):
    """The mean of each row.

    Each mean is summed in float64, token after token, divided, and rounded once. Its bits depend on its own row alone.

    Attributes:
        means: float32 (B, D), complete after the last chunk.

    """

    means: Float32

    def __init__(self, lengths: Int64, width: int) -> None:
        """Begin with the first of the rows; `lengths` is int64 (B,), at least 1 each, and `width` is D."""

    def add(self, vectors: Float32) -> None:
        """Add the next vectors of the rows, float32 (T, D)."""


class KernelMeans:
    """Means by `_row_means.c`; see `Means`."""

    def __init__(self, lengths: Int64, width: int) -> None:
        self._lengths = np.ascontiguousarray(lengths)
        self._place, self._total = np.zeros(2, np.int64), np.empty(width)
        self.means: Float32 = np.empty((len(lengths), width), np.float32)

    def add(self, vectors: Float32) -> None:
        """Add the next vectors."""
        add_to_means(np.ascontiguousarray(vectors), self._lengths, self._place, self._total, self.means)


class NumpyMeans:
    """Means by NumPy; see `Means`."""

    def __init__(self, lengths: Int64, width: int) -> None:
        self._lengths: list[int] = lengths.tolist()
        self._row = self._count = 0
        self._total: NDArray[np.floating] = np.empty(0)
        self.means: Float32 = np.empty((len(lengths), width), np.float32)

    def add(self, vectors: Float32) -> None:
        """Add the next vectors."""
        # NumPy adds row after row only to a contiguous array with several columns; it sums one column in pairs.
        vectors = np.ascontiguousarray(np.repeat(vectors, 2, axis=1) if vectors.shape[1] == 1 else vectors)
        while len(vectors):
            length, count = self._lengths[self._row], self._count
            part, vectors = vectors[: length - count], vectors[length - count :]
            summands = np.concatenate((self._total, part), dtype=np.float64) if count else part
            self._total = np.add.reduce(summands, axis=0, dtype=np.float64, keepdims=True)
            self._count += len(part)
            if self._count == length:
                self.means[self._row] = self._total[0, : self.means.shape[1]] / length
                self._row, self._count = self._row + 1, 0


RowMeans: type[Means] = KernelMeans if BUILT else NumpyMeans


class LookupTable:
    """The rows of all token ids, float32 (V, D)."""

    def __init__(self, rows: Float32) -> None:
        self._rows = rows

    def means(self, ids: TokenRows) -> Float32:
        """Return the mean of the rows of `ids`, float32 (B, D), with the bits of `RowMeans`.

        Raises:
            IndexError: an id has no row.

        """
        means: Float32 = np.empty((len(ids.lengths), self._rows.shape[1]), np.float32)
        average_rows(np.ascontiguousarray(ids.values), np.ascontiguousarray(ids.lengths), self._rows, means)
        return means


def map_lookup(folder: Path, manifest: Manifest) -> LookupTable | None:
    """Map the table of the artifact in `folder`; None if `embeddings` are not its rows, or without the kernel."""
    place = find_lookup(folder, manifest) if BUILT else None
    if place is None:
        return None
    rows = np.memmap(folder / DATA, np.float32, "r", place.begin, (place.rows, place.width))
    return LookupTable(rows.view(np.ndarray))
