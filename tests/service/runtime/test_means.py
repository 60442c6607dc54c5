"""Means of rows, in chunks and of a table. Oracles: a loop in float64, and the vectors of onnxruntime."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRows
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.means import KernelMeans, LookupTable, Means, NumpyMeans, RowMeans
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import make_repository

if BUILT:
    pass

built = pytest.mark.skipif(not BUILT, reason="_row_means.c was not built")
LOOKUPS = ["alibi-7x256x9000", "llama-300x64"]
"""Stored artifacts with rows of one table as `embeddings`. A table of t5 is too small for a data file."""
KINDS = [NumpyMeans, *([KernelMeans] if BUILT else [])]
LENGTHS = np.array([3, 1, 1, 300, 2, 64])


def expected_means(vectors: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    means = []
    for part in np.split(vectors, np.cumsum(lengths)[:-1]):
        total = np.zeros(part.shape[1])
        for vector in part:
            total = total + vector
        means.append((total / len(part)).astype(np.float32))
    return np.stack(means)


def values_of_every_size(rows: int, width: int) -> NDArray[np.float32]:
    random = np.random.default_rng([rows, width])
    scale = 10.0 ** random.integers(-6, 6, (rows, width))
    values = (random.standard_normal(scale.shape) * scale).astype(np.float32)
    values[3] = -0.0
    return values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 33])
@pytest.mark.parametrize("size", [1, 7, 371])
@pytest.mark.parametrize("order", ["C", "F"])
def test_means_of_chunks_equal_loop_in_float64(
    kind: type[Means], width: int, size: int, order: Literal["C", "F"]
) -> None:
    vectors = values_of_every_size(int(LENGTHS.sum()), width)  # the fourth vector is the only one of its row
    # The sum of the row of 300 is nothing but rounding errors, so it shows the order of the additions.
    vectors[155:305] = -np.random.default_rng(size).permutation(vectors[5:155])
    found = kind(LENGTHS, width)
    for begin in range(0, len(vectors), size):
        found.add(np.array(vectors[begin : begin + size], order=order))
    assert found.means.tobytes() == expected_means(vectors, LENGTHS).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_mean_of_float64_sum_beyond_float32_is_finite(kind: type[Means]) -> None:
    largest = np.finfo(np.float32).max
    found = kind(np.array([2]), 2)
    found.add(np.full((2, 2), largest, np.float32))
    assert (found.means == largest).all()


@built
@pytest.mark.parametrize("width", [1, 5, 33, 256])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 1, 300, 2, 64], [5000]])
def test_means_equal_loop_in_float64(width: int, lengths: list[int]) -> None:
    table = values_of_every_size(50, width)
    ids = TokenRows(np.random.default_rng(width).integers(0, 50, sum(lengths)), np.array(lengths))
    assert LookupTable(table).means(ids).tobytes() == expected_means(table[ids.values], ids.lengths).tobytes()


@pytest.fixture
def models(tmp_path: Path) -> dict[str, TokenModel]:
    names = {name: name for name in ("alibi-7x256x9000", "llama-300x64", "t5", "bert", "gemma", "sinusoid", "segments")}
    repository = Repository(make_repository(tmp_path, **names), CPU, 1)
    return {name: repository.get(name) for name in names}


@built
def test_only_bare_lookups_have_a_table(models: dict[str, TokenModel]) -> None:
    assert [name for name, model in models.items() if model.lookup_table is not None] == LOOKUPS


@built
def test_means_of_table_equal_those_of_session(models: dict[str, TokenModel]) -> None:
    model = models[LOOKUPS[1]]
    assert model.lookup_table is not None
    size = model.manifest.vocab_size
    rows = TokenRows(np.arange(size), np.array([1, size - 1]))
    means = RowMeans(rows.lengths, model.manifest.width)
    means.add(model.look_up(rows.values))
    assert model.lookup_table.means(rows).tobytes() == means.means.tobytes()
