"""The table of a model with its rows as vectors: `_row_means.c` averages them without a copy of each.

Letters: B batch, V token ids, D width.
"""

from pathlib import Path

import numpy as np

from preblock.service.artifacts.lookup_graph import find_lookup
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA
from preblock.service.core.types import TokenRows
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.runner import Float32

if BUILT:
    from preblock.service.runtime._kernels import average_rows


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
