"""Pooling: one vector for each row.

Letters: B batch, T tokens of all rows, D width.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import Int64, TokenRequest, TokenRows
from preblock.service.runtime.runner import Float32

POOLINGS = ("none", "mean", "first", "last")


def pool(vectors: Float32, rows: TokenRows, real: Int64 | None, pooling: str) -> Float32:
    """Return the mean, the first or the last real vector of each row, float32 (B, D).

    Args:
        vectors: float32 (T, D).
        rows: the tokens of the vectors.
        real: int64 (T,), 1 for a real token, at least one in each row; None if all tokens are real.
        pooling: "mean", "first" or "last".

    """
    if pooling == "mean":
        return mean([vectors], rows, real)
    return vectors[end_tokens(rows, real, pooling)]


def finish(pooled: Float32, request: TokenRequest, manifest: Manifest) -> Float32:
    """Return the first `dimensions` columns of pooled vectors, float32 (B, D), normalized as request or model state.

    Each row is divided by its Euclidean norm, summed in float64, and rounded once. A row of zeros stays.
    """
    vectors = np.ascontiguousarray(pooled[:, : request.dimensions])
    stated = manifest.sentence is not None and manifest.sentence.normalize
    if not (stated if request.normalize is None else request.normalize):
        return vectors
    wide = vectors.astype(np.float64)
    norms = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    normalized: Float32 = (wide / np.where(norms == 0, 1, norms)).astype(np.float32)
    return normalized


def end_tokens(rows: TokenRows, real: Int64 | None, pooling: str) -> Int64:
    """Return the index of the "first" or "last" real token of each row: int64 (B,), 0 to T - 1."""
    index = np.arange(len(rows.values))
    if real is not None:
        keep = real.astype(np.bool_)
        index, rows = index[keep], rows.kept(keep)
    return index[rows.starts if pooling == "first" else rows.starts + rows.lengths - 1]


def mean(chunks: Iterable[Float32], rows: TokenRows, real: Int64 | None) -> Float32:
    """Return the mean of the real vectors of each row, float32 (B, D), from chunks of the vectors (T, D) in order.

    Each mean is summed in float64, token after token, divided, and rounded once. Its bits depend on its own row alone.
    Several chunks need a D of 2 or more, because NumPy sums a single column in another order.
    """
    keep = None if real is None else real.astype(np.bool_)
    lengths = (rows if keep is None else rows.kept(keep)).lengths.tolist()
    total: NDArray[np.floating] = np.empty(0)
    means: list[Float32] = []
    begin = count = 0
    for chunk in chunks:
        end = begin + len(chunk)
        vectors = chunk if keep is None else chunk[keep[begin:end]]
        begin = end
        while len(vectors):
            length = lengths[len(means)]
            part, vectors = vectors[: length - count], vectors[length - count :]
            summands = np.concatenate((total, part), dtype=np.float64) if count else part
            total = np.add.reduce(summands, axis=0, dtype=np.float64, keepdims=True)
            count += len(part)
            if count == length:
                means.append((total / length).astype(np.float32))
                count = 0
    return np.concatenate(means)
