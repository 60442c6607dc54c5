"""One vector for each row. Oracle: sums of one vector after another."""

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRows
from preblock.service.engine.vectors import mean, pool

LENGTHS = np.array([3, 1, 700, 2, 64])


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    """Values of very different size: another order of a sum would show."""
    random = np.random.default_rng(0)
    scale = 10.0 ** random.integers(-6, 6, (int(LENGTHS.sum()), 5))
    return (random.standard_normal(scale.shape) * scale).astype(np.float32)


@pytest.fixture(scope="module")
def pooled_rows() -> TokenRows:
    return TokenRows(np.zeros(int(LENGTHS.sum()), np.int64), LENGTHS)


def parts_of(vectors: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return np.split(vectors, np.cumsum(LENGTHS)[:-1])


@pytest.mark.parametrize("width", [1, 5])
def test_pooled_rows_equal_a_loop_in_token_order(
    vectors: NDArray[np.float32], pooled_rows: TokenRows, width: int
) -> None:
    """The mean is summed in float64, one vector after another."""
    narrow = np.ascontiguousarray(vectors[:, :width])
    means = []
    for part in parts_of(narrow):
        total = np.zeros(width)
        for vector in part:
            total += vector
        means.append((total / len(part)).astype(np.float32))
    first, last = ([part[index] for part in parts_of(narrow)] for index in (0, -1))
    for pooling, expected in (("mean", means), ("first", first), ("last", last)):
        assert pool(narrow, pooled_rows, None, pooling).tobytes() == np.stack(expected).tobytes(), pooling


def test_mean_of_chunks_equals_mean_bit_for_bit(vectors: NDArray[np.float32], pooled_rows: TokenRows) -> None:
    for real in (None, (np.arange(len(vectors)) % 9 != 8).astype(np.int64)):
        expected = pool(vectors, pooled_rows, real, "mean").tobytes()
        for size in (1, 7, 700, 2000):
            chunks = (vectors[begin : begin + size] for begin in range(0, len(vectors), size))
            assert mean(chunks, pooled_rows, real, vectors.shape[1]).tobytes() == expected, size


def test_mean_of_negative_zeros_keeps_their_sign() -> None:
    row = TokenRows.of_array(np.zeros((1, 2), np.int64))
    zeros = np.full((2, 3), -0.0, np.float32)
    assert mean([zeros[:1], zeros[1:]], row, None, 3).tobytes() == pool(zeros, row, None, "mean").tobytes()
