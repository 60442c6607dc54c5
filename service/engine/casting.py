"""The output type: its check, and the cast of vectors to it."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import NGRAM_OUTPUTS, STORED
from preblock.service.core.errors import Invalid
from preblock.service.core.types import DTYPES, TENSOR_DTYPES


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


def check_dtype(dtype: str, outputs: Iterable[str], manifest: Manifest) -> None:
    """Raise Invalid if the type of a response is unknown, or if an output has no stored form."""
    if not has_dtype(dtype, outputs, manifest):
        without = [output for output in outputs if output not in NGRAM_OUTPUTS]
        reason = f", since {without[0]} has no stored form" if without and dtype == STORED else ""
        raise Invalid("dtype", dtype, ", ".join(DTYPES) + reason)


def has_dtype(dtype: str, outputs: Iterable[str], manifest: Manifest) -> bool:
    """Return whether a response with `outputs` may have the type."""
    return dtype in DTYPES or (dtype == STORED and bool(manifest.ngram_tables) and set(outputs) <= set(NGRAM_OUTPUTS))
