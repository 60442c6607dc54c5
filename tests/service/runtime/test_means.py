"""Means of rows, in chunks and of a table. Oracles: a loop in float64, and the vectors of onnxruntime."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRows
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.means import KernelMeans, LookupTable, Means, NumpyMeans, RowMeans
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import make_repository

if BUILT:
    from preblock.service.runtime._kernels import add_to_means, average_rows

built = pytest.mark.skipif(not BUILT, reason="_row_means.c was not built")
LOOKUPS = ["alibi-7x256x9000", "llama-300x64"]
"""Stored artifacts with rows of one table as `embeddings`. A table of t5 is too small for a data file."""
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


@built
@pytest.mark.parametrize("width", [1, 5, 33, 256])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 1, 300, 2, 64], [5000]])
def test_means_equal_loop_in_float64(width: int, lengths: list[int]) -> None:
    random = np.random.default_rng([width, len(lengths)])
    scale = 10.0 ** random.integers(-6, 6, (50, width))
    table = (random.standard_normal(scale.shape) * scale).astype(np.float32)
    table[3] = -0.0
    ids = TokenRows(random.integers(0, 50, sum(lengths)), np.array(lengths))
    expected = []
    for row in np.split(ids.values, np.cumsum(lengths)[:-1]):
        total = np.zeros(width)
        for vector in table[row]:
            total = total + vector
        expected.append((total / len(row)).astype(np.float32))
    assert LookupTable(table).means(ids).tobytes() == np.stack(expected).tobytes()


@pytest.fixture
def models(tmp_path: Path) -> dict[str, TokenModel]:
    names = {name: name for name in ("alibi-7x256x9000", "llama-300x64", "t5", "bert", "gemma", "sinusoid", "segments")}
    repository = Repository(make_repository(tmp_path, **names))
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


@built
def test_id_without_a_row_is_rejected() -> None:
    for id_ in (-1, 4, 2**63 - 1, -(2**63)):
        with pytest.raises(IndexError, match=f"id: got {id_}, expected 0 to 3"):
            LookupTable(np.zeros((4, 2), np.float32)).means(TokenRows(np.array([0, 1, id_]), np.array([3])))


@built
def test_wrong_sizes_of_rows_are_rejected() -> None:
    arguments: dict[str, NDArray[Any]] = {
        "ids": np.zeros(3, np.int64),
        "lengths": np.array([1, 2]),
        "table": np.zeros((4, 2), np.float32),
        "means": np.zeros((2, 2), np.float32),
    }
    average_rows(*arguments.values())
    odd = np.zeros(17, np.uint8)[1:]
    for name, values in (
        *(("ids", ids) for ids in (np.zeros(4, np.int64), np.zeros(25, np.uint8))),
        *(("lengths", np.array(lengths)) for lengths in ([3, 0], [4, -1], [2**62, 2**62])),
        *(("lengths", lengths) for lengths in (np.zeros(0, np.int64), odd.view(np.int64))),
        *(("table", table) for table in (np.zeros(3, np.float32), odd.view(np.float32))),
        *(("means", np.zeros(size, np.float32)) for size in (0, 5)),
    ):
        with pytest.raises(ValueError, match=r"^lengths: got \d rows, "):
            average_rows(*(arguments | {name: values}).values())
