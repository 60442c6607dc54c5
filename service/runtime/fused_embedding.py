"""Sums of token rows and positions, made in one pass by `_fused_embedding.c`, bit for bit those of the graph.

Two operators make them in onnxruntime: what one writes, the other reads and writes again.

Letters: V vocabulary, P width of both tables, B batch, L length.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA
from preblock.service.artifacts.onnx_match import summand_of

try:
    from preblock.service.runtime._fused_embedding import add_rows
except ImportError:  # installed where there was no compiler
    BUILT = False
else:
    BUILT = True

Float32 = NDArray[np.float32]


class TokenTable(NamedTuple):
    """Rows (V, P), float32, which stay in the data file of their artifact, and what each is multiplied by."""

    rows: Float32
    scale: float


def map_tokens(folder: Path, positions: Float32) -> TokenTable | None:
    """Return what `positioned.onnx` of the artifact in `folder`, which was checked, adds `positions` (1, M, P) to.

    None where that is something else than rows of one float32 table times a number, or without the C module.
    """
    summand = summand_of(folder) if BUILT else None
    if summand is None or summand.shape[1] != positions.shape[2] or not positions.flags.aligned:
        return None
    rows = np.memmap(folder / DATA, np.float32, "r", summand.begin, summand.shape).view(np.ndarray)
    return TokenTable(rows, summand.scale)


class Sums:
    """Calls of one shape, as `runtime.Prepared` has them.

    Args:
        tokens: the table.
        positions: float32 (1, L, P) or, for rows of one token, (B, 1, P), contiguous; read where they lie.
        out: float32 (B, L, P), contiguous; written.

    """

    def __init__(self, tokens: TokenTable, positions: Float32, out: Float32) -> None:
        self._tokens, self._positions, self._out = tokens, positions, out

    def take(self, positions: Float32) -> None:
        """Read other positions, contiguous and of the same shape, where they lie."""
        self._positions = positions

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Write the sums for `input_ids`, int64 (B, L).

        Raises:
            IndexError: an id has no row.

        """
        ids = np.ascontiguousarray(feeds["input_ids"])
        rows, scale = self._tokens
        add_rows(ids, rows, scale, self._positions, self._out, rows.shape[1])
