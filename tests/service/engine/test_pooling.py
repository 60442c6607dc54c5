"""One vector for each row. Oracles: exact sums, and sums of one row after another."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRows
from preblock.service.engine.pooling import mean, pool

LENGTHS = np.array([3, 1, 700, 2, 64])


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    """Values of very different size: another order of a sum would show."""
    random = np.random.default_rng(0)
    scale = 10.0 ** random.integers(-6, 6, (int(LENGTHS.sum()), 5))
    return (random.standard_normal(scale.shape) * scale).astype(np.float32)


@pytest.fixture(scope="module")
def rows() -> TokenRows:
    return TokenRows(np.zeros(int(LENGTHS.sum()), np.int64), LENGTHS)


def parts_of(vectors: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return np.split(vectors, np.cumsum(LENGTHS)[:-1])


def test_mean_is_within_one_ulp_of_exact_mean(vectors: NDArray[np.float32], rows: TokenRows) -> None:
    exact = [[math.fsum(column) / len(part) for column in part.T.tolist()] for part in parts_of(vectors)]
    np.testing.assert_array_max_ulp(pool(vectors, rows, None, "mean"), np.array(exact, np.float32), 1)


def test_mean_is_summed_in_float64_in_token_order(vectors: NDArray[np.float32], rows: TokenRows) -> None:
    expected = []
    for part in parts_of(vectors):
        total = np.zeros(part.shape[1])
        for vector in part:
            total += vector
        expected.append((total / len(part)).astype(np.float32))
    assert pool(vectors, rows, None, "mean").tobytes() == np.stack(expected).tobytes()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("width", [1, 5])
def test_pooled_row_is_independent_of_other_rows(
    vectors: NDArray[np.float32], rows: TokenRows, pooling: str, width: int
) -> None:
    narrow = np.ascontiguousarray(vectors[:, :width])
    together = pool(narrow, rows, None, pooling)
    for part, found in zip(parts_of(narrow), together, strict=True):
        alone = pool(part, TokenRows.of_array(np.zeros((1, len(part)), np.int64)), None, pooling)
        assert alone.tobytes() == found.tobytes()


@pytest.mark.parametrize(("pooling", "index"), [("first", 0), ("last", -1)])
def test_first_and_last_pooling_return_tokens_of_row(
    vectors: NDArray[np.float32], rows: TokenRows, pooling: str, index: int
) -> None:
    expected = np.stack([part[index] for part in parts_of(vectors)])
    assert pool(vectors, rows, None, pooling).tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 7, 700, 2000])
@pytest.mark.parametrize("some", [False, True])
def test_mean_of_chunks_equals_mean_bit_for_bit(
    vectors: NDArray[np.float32], rows: TokenRows, size: int, some: bool
) -> None:
    real = (np.arange(len(vectors)) % 9 != 8).astype(np.int64) if some else None
    chunks = (vectors[begin : begin + size] for begin in range(0, len(vectors), size))
    assert mean(chunks, rows, real, vectors.shape[1]).tobytes() == pool(vectors, rows, real, "mean").tobytes()


def test_mean_of_negative_zeros_keeps_their_sign() -> None:
    row = TokenRows.of_array(np.zeros((1, 2), np.int64))
    zeros = np.full((2, 3), -0.0, np.float32)
    assert mean([zeros[:1], zeros[1:]], row, None, 3).tobytes() == pool(zeros, row, None, "mean").tobytes()


def test_pooling_counts_only_real_tokens() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(6, 1)
    rows, real = TokenRows(np.zeros(6, np.int64), np.array([4, 2])), np.array([0, 1, 1, 0, 1, 0])
    found = {pooling: pool(vectors, rows, real, pooling).tolist() for pooling in ("mean", "first", "last")}
    assert found == {"mean": [[1.5], [4]], "first": [[1], [4]], "last": [[2], [4]]}
