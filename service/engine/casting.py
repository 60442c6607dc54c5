"""Casts vectors to the output type."""

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import DTYPES


def cast(vectors: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Return `vectors` in the output type `dtype`, rounded to nearest, ties to even.

    Raises:
        Invalid: a finite value is too large for the type.

    """
    if dtype == "float32":
        return vectors
    with np.errstate(over="ignore"):
        narrow = vectors.astype(DTYPES[dtype])
    if not np.isfinite(narrow).all() and np.isfinite(vectors).all():
        raise Invalid("dtype", dtype, f"float32, since a value of {float(np.abs(vectors).max()):g} does not fit")
    return narrow
