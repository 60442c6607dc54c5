"""Tables of sinusoids as NumPy arrays: the exact ones, and those of libraries, bit for bit.

Letters: D width of a vector.
"""

import numpy as np
from numpy.typing import NDArray

from preblock.models.modules.sinusoids import COSINE, POSITIONS, RECIPES, SINE, _turns_per_position, sinusoid

__all__ = ["COSINE", "POSITIONS", "RECIPES", "SINE", "exact_sinusoids", "library_table", "turns_per_position"]


def turns_per_position(width: int, base: float = 10000.0) -> tuple[tuple[float, ...], ...]:
    """Return the frequencies of exact sinusoids as turns per position, in four parts of D // 2 numbers."""
    return _turns_per_position(width, base)


def exact_sinusoids(positions: NDArray[np.int64], width: int, base: float = 10000.0) -> NDArray[np.float32]:
    """Return the exact sinusoids, float32 (..., D), of int64 `positions` (...)."""
    import torch

    vectors: NDArray[np.float32] = sinusoid(torch.from_numpy(positions), width, base).numpy()
    return vectors


def library_table(recipe: str, rows: int, width: int, zero_row: int | None = None) -> NDArray[np.float32]:
    """Return the table of a sinusoid recipe, float32 (rows, D), with zeros in the row `zero_row`."""
    table: NDArray[np.float32] = RECIPES[recipe](rows, width, zero_row).numpy()
    return table
