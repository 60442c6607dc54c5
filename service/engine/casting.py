"""Casts vectors to the output type."""

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import TENSOR_DTYPES


def cast(vectors: NDArray[np.generic], dtype: str) -> NDArray[np.generic]:
    """Return `vectors` in the output type `dtype`, float32 ones rounded to nearest, ties to even.

    Raises:
        Invalid: a finite value is too large for the type.

    """
    if vectors.dtype == TENSOR_DTYPES[dtype]:
        return vectors
    with np.errstate(over="ignore"):
        narrow = vectors.astype(TENSOR_DTYPES[dtype])
    if not np.isfinite(narrow).all() and np.isfinite(vectors).all():
        raise Invalid("dtype", dtype, f"float32, since a value of {float(np.abs(vectors).max()):g} does not fit")
    return narrow
