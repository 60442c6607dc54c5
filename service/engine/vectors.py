"""Vectors after a run: pooled, normalized, and cast to the output type.

Letters: B batch, T tokens of all rows, D output width.
"""

from collections.abc import Iterable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS, NGRAM_OUTPUTS, STORED
from preblock.service.core.errors import Invalid
from preblock.service.core.types import DTYPES, TENSOR_DTYPES, Int64, TokenRequest, TokenRows
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.means import LookupTable, RowMeans
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.runner import Float32

POOLINGS = ("none", "mean", "first", "last")


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


def pool(vectors: Float32, rows: TokenRows, real: Int64 | None, pooling: str) -> Float32:
    """Return the mean, the first or the last real vector of each row, float32 (B, D).

    Args:
        vectors: float32 (T, D).
        rows: the tokens of the vectors.
        real: int64 (T,), 1 for a real token, at least one in each row; None if all tokens are real.
        pooling: "mean", "first" or "last".

    """
    if pooling == "mean":
        return mean([vectors], rows, real, vectors.shape[-1])
    return vectors[end_tokens(rows, real, pooling)]


def table_of_means(model: TokenModel, names: tuple[str, ...], request: TokenRequest) -> LookupTable | None:
    """Return the table to average rows of, in place of a run with the outputs `names`; None if the model must run."""
    in_place = names == (EMBEDDINGS,) and request.pooling == "mean" and request.given is None
    return model.lookup_table if in_place else None


def average_in_place(
    table: LookupTable, request: TokenRequest, manifest: Manifest, real: Int64 | None, record: RequestRecord
) -> NDArray[np.generic]:
    """Return the mean of the table's rows for each row of a request, (B, width), in the type of the response.

    `real` is int64 (T,), 1 for a token with a part in the mean; None if all tokens have one.
    """
    rows = request.input_ids
    record.dequeued = perf_counter()
    means = table.means(rows if real is None else rows.kept(real.astype(np.bool_)))
    record.ran, record.batch = perf_counter(), record.rows
    return cast(finish_pooled(means, request, manifest), request.dtype)


def finish_pooled(pooled: Float32, request: TokenRequest, manifest: Manifest) -> Float32:
    """Return the first `dimensions` columns of pooled vectors, float32 (B, D), normalized as request or model state.

    Each row is divided by its Euclidean norm, summed in float64, and rounded once. A row of zeros stays.
    """
    vectors = np.ascontiguousarray(pooled[:, : request.dimensions])
    stated = manifest.sentence is not None and manifest.sentence.normalize
    if not (stated if request.normalize is None else request.normalize):
        return vectors
    norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    if not norms.all():
        norms[norms == 0] = 1
    normalized: Float32 = np.empty_like(vectors)
    np.divide(vectors, norms, out=normalized, casting="same_kind")
    return normalized


def end_tokens(rows: TokenRows, real: Int64 | None, pooling: str) -> Int64:
    """Return the index of the "first" or "last" real token of each row: int64 (B,), 0 to T - 1."""
    index = np.arange(len(rows.values))
    if real is not None:
        keep = real.astype(np.bool_)
        index, rows = index[keep], rows.kept(keep)
    return index[rows.starts if pooling == "first" else rows.starts + rows.lengths - 1]


def mean(chunks: Iterable[Float32], rows: TokenRows, real: Int64 | None, width: int) -> Float32:
    """Return the mean of the real vectors of each row, float32 (B, D), from chunks of the vectors (T, D) in order."""
    keep = None if real is None else real.astype(np.bool_)
    found, begin = RowMeans((rows if keep is None else rows.kept(keep)).lengths, width), 0
    for chunk in chunks:
        end = begin + len(chunk)
        found.add(chunk if keep is None else chunk[keep[begin:end]])
        begin = end
        del chunk  # lets the next chunk reuse this buffer
    return found.means
