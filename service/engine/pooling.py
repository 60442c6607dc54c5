"""One vector for each row.

Letters: B batch, T tokens of all rows, D width.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.types import Int64, TokenRows

POOLINGS = ("none", "mean", "first", "last")


def pool(vectors: NDArray[np.float32], rows: TokenRows, real: Int64 | None, pooling: str) -> NDArray[np.float32]:
    """Return float32 (B, D): of the real tokens of each row the mean, the first or the last.

    A mean is summed in float64, token after token, divided, and rounded once: its bits depend on its own row alone.

    Args:
        vectors: float32 (T, D).
        rows: of the tokens.
        real: 1 for a real token, at least one in each row; None where all are.
        pooling: "mean", "first" or "last".

    """
    if real is not None:
        keep = real.astype(np.bool_)
        vectors, rows = vectors[keep], rows.kept(keep)
    if pooling != "mean":
        return vectors[rows.starts if pooling == "first" else rows.starts + rows.lengths - 1]
    means = np.empty((len(rows.lengths), vectors.shape[1]), np.float32)
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        means[row] = np.add.reduce(vectors[start : start + length], axis=0, dtype=np.float64) / length
    return means


def pool_row(pieces: Iterable[NDArray[np.float32]], real: Int64 | None, pooling: str) -> NDArray[np.float32]:
    """Return float32 (1, D), D of 2 or more, of one row with vectors (T, D) in pieces; the bits are those of `pool`."""
    total: NDArray[np.floating] | None = None
    begin = count = 0
    for piece in pieces:
        end = begin + len(piece)
        vectors = piece if real is None else piece[real[begin:end].astype(np.bool_)]
        begin, count = end, count + len(vectors)
        if not len(vectors):
            continue
        if pooling == "mean":
            before = vectors[:0] if total is None else total
            total = np.add.reduce(np.concatenate((before, vectors), dtype=np.float64), axis=0, keepdims=True)
        else:
            total = (vectors[-1:] if pooling == "last" else vectors[:1]).copy()
        if pooling == "first":
            break
    assert total is not None
    return (total / count).astype(np.float32) if pooling == "mean" else total.astype(np.float32)
