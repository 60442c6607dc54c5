"""Means of rows that come in chunks. Oracle: a loop over the vectors of each row, in float64."""

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.row_means import KernelMeans, Means, NumpyMeans

if BUILT:
    from preblock.service.runtime._kernels import add_to_means

built = pytest.mark.skipif(not BUILT, reason="_row_means.c was not built")
KINDS = [NumpyMeans, *([KernelMeans] if BUILT else [])]
LENGTHS = np.array([3, 1, 1, 300, 2, 64])


def expected_means(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    means = []
    for part in np.split(vectors, np.cumsum(LENGTHS)[:-1]):
        total = np.zeros(part.shape[1])
        for vector in part:
            total = total + vector
        means.append((total / len(part)).astype(np.float32))
    return np.stack(means)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 33])
@pytest.mark.parametrize("size", [1, 7, 371])
@pytest.mark.parametrize("order", ["C", "F"])
def test_means_of_chunks_equal_loop_in_float64(
    kind: type[Means], width: int, size: int, order: Literal["C", "F"]
) -> None:
    random = np.random.default_rng([width, size])
    scale = 10.0 ** random.integers(-6, 6, (int(LENGTHS.sum()), width))
    vectors = (random.standard_normal(scale.shape) * scale).astype(np.float32)
    vectors[3] = -0.0  # the only vector of its row
    # The sum of the row of 300 is nothing but rounding errors, so it shows the order of the additions.
    vectors[155:305] = -random.permutation(vectors[5:155])
    found = kind(LENGTHS, width)
    for begin in range(0, len(vectors), size):
        found.add(np.array(vectors[begin : begin + size], order=order))
    assert found.means.tobytes() == expected_means(vectors).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_mean_of_float64_sum_beyond_float32_is_finite(kind: type[Means]) -> None:
    largest = np.finfo(np.float32).max
    found = kind(np.array([2]), 2)
    found.add(np.full((2, 2), largest, np.float32))
    assert (found.means == largest).all()


@built
@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"vectors": np.zeros((4, 2), np.float32)}, "vectors: got 4"),
        ({"lengths": np.array([1, 0])}, "vectors: got 2"),
        ({"place": np.array([2, 0])}, "vectors: got 2"),
        ({"place": np.array([-1, 0])}, "vectors: got 2"),
        ({"place": np.array([0, -1])}, "vectors: got 2"),
        ({"place": np.zeros(3, np.int64)}, "width: got 2"),
        ({"vectors": np.zeros(3, np.float32)}, "width: got 2"),
        ({"means": np.zeros((3, 2), np.float32)}, "width: got 2"),
        ({"total": np.zeros(0)}, "width: got 0"),
        ({"lengths": np.zeros(17, np.uint8)[1:].view(np.int64)}, "width: got 2"),
    ],
)
def test_wrong_sizes_are_rejected_by_kernel(changed: dict[str, NDArray[Any]], field: str) -> None:
    arguments = {
        "vectors": np.zeros((2, 2), np.float32),
        "lengths": np.array([1, 2]),
        "place": np.zeros(2, np.int64),
        "total": np.zeros(2),
        "means": np.zeros((2, 2), np.float32),
    }
    with pytest.raises(ValueError, match=f"^{field}, "):
        add_to_means(*(arguments | changed).values())
