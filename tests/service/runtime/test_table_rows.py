"""Rows of tables: summed, averaged and gathered.

Oracles: NumPy, which multiplies, rounds, adds and rounds; a loop in float64; and the graphs, by onnxruntime.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.core.types import TokenRows
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.means import KernelMeans, LookupTable, Means, NumpyMeans
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.ngram_rows import Gather, KernelGather, NumpyGather, StoredRows
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory
from tests.support.artifacts import make_repository

if BUILT:
    from preblock.service.runtime._kernels import add_rows

built = pytest.mark.skipif(not BUILT, reason="the kernels were not built")
Float32 = NDArray[np.float32]


def test_kernel_is_built_if_compiler_is_available() -> None:
    assert BUILT or shutil.which("cc") is None


def summed(ids: NDArray[np.int64], table: Float32, scale: float, positions: Float32) -> Float32:
    rows = table[ids.ravel()] * np.float32(scale)
    return np.asarray(rows + np.tile(positions, (ids.size // max(1, len(positions)), 1)), np.float32)


@built
@pytest.mark.parametrize("width", [1, 3, 64, 767])
@pytest.mark.parametrize("scale", [1.0, 22.627416997969522, -0.3])
def test_sum_equals_numpy_bit_for_bit(width: int, scale: float) -> None:
    scale = float(np.float32(scale))
    for tokens, placed in ((0, 0), (0, 3), (1, 1), (2, 1), (3, 3), (4, 2), (5, 5), (36, 9)):
        random = np.random.default_rng([width, tokens])
        table = random.standard_normal((100, width), np.float32)
        positions = random.standard_normal((placed, width), np.float32)
        ids = random.integers(0, 100, tokens)
        ids[:1], ids[-1:] = 99, 0
        out = np.full((tokens, width), 7, np.float32)
        add_rows(ids, table, scale, positions, out, width)
        assert out.tobytes() == summed(ids, table, scale, positions).tobytes(), (tokens, placed)


@built
@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, 1e-45, -3e38])
def test_special_values_equal_numpy(special: float) -> None:
    table = np.full((2, 8), special, np.float32)
    positions = np.array([[0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38]], np.float32)
    out = np.empty((2, 8), np.float32)
    add_rows(np.array([1, 0]), table, 2.0, positions, out, 8)
    with np.errstate(all="ignore"):
        expected = summed(np.array([1, 0]), table, 2.0, positions)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(np.signbit(out[out == 0]), np.signbit(expected[expected == 0]))


@pytest.fixture
def model(weighty_repository: Path) -> TokenModel:
    return Repository(weighty_repository).get("gpt")


def feeds_of(batch: int, length: int, *offsets: int) -> dict[str, NDArray[np.int64]]:
    random = np.random.default_rng([batch, length, *offsets])
    return {"input_ids": random.integers(0, 100, (batch, length)), "offset": np.array(offsets)}


def expected(model: TokenModel, feeds: dict[str, NDArray[np.int64]]) -> bytes:
    return model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()


CALLS = [
    *(((1, 1), (49,)), ((200, 1), (3,)), ((4, 30), (10,)), ((50, 1), range(50)), ((3, 1), (49, 3, 3))),
    *(((2, 2), (0, 1)), ((0, 3), (0,)), ((3, 0), (0,)), ((16385, 1), (0,))),  # of no single call of the kernel
]


def test_call_of_any_shape_equals_plain_graph(model: TokenModel, weighty_repository: Path) -> None:
    plain = onnxruntime.InferenceSession(weighty_repository / "gpt/1/model.onnx", providers=["CPUExecutionProvider"])
    for shape, offsets in CALLS:
        feeds = feeds_of(*shape, *offsets)
        (vectors,) = plain.run(["embeddings"], feeds)
        for ids in (feeds["input_ids"], np.repeat(feeds["input_ids"], 3, axis=1)[:, ::3]):  # the latter with gaps
            found = model.run(feeds | {"input_ids": ids}, ("embeddings",))["embeddings"]
            assert (found.shape, found.tobytes()) == (vectors.shape, vectors.tobytes()), (shape, offsets)


@built
def test_threads_do_not_interfere(model: TokenModel) -> None:
    calls = [feeds_of(1 + seed % 3, 30 + seed % 5, seed % 10) for seed in range(40)]
    right = [expected(model, feeds) for feeds in calls]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = pool.map(lambda feeds: model.run(feeds, ("embeddings",))["embeddings"].tobytes(), calls)
            assert list(found) == right


@built
@pytest.mark.parametrize(
    ("table", "changed", "field"),
    [
        ("tokens", {"rows": 2**40}, "kernel.tokens.rows"),
        ("tokens", {"begin": 2}, "kernel.tokens.begin"),
        ("tokens", {"width": 16}, "kernel.tokens.width"),
        ("tokens", {"scale": 2.0}, "kernel: the tables give other vectors than model.onnx"),
        ("positions", {"rows": 49}, "kernel.positions.rows"),
        ("positions", {"begin": 2**50}, "kernel.positions.rows"),
        ("positions", {"begin": 4}, "kernel: the tables give other vectors than model.onnx"),
        ("positions", {"first": 1}, "kernel.positions.rows"),
    ],
)
def test_manifest_with_wrong_kernel_tables_is_rejected(
    weighty_repository: Path, tmp_path: Path, table: str, changed: dict[str, Any], field: str
) -> None:
    root = with_kernel(weighty_repository, tmp_path, lambda kernel: kernel | {table: kernel[table] | changed})
    with pytest.raises(ArtifactError) as refused:
        Repository(root)
    assert field in str(refused.value)


def with_kernel(source: Path, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a copy of a repository with another `kernel` in the manifest of `gpt`."""
    root = shutil.copytree(source, place / "root")
    file = root / "gpt/1" / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"kernel": change(manifest["kernel"])}))
    return root


def test_artifact_without_kernel_is_run_by_onnxruntime(weighty_repository: Path, tmp_path: Path) -> None:
    model = Repository(with_kernel(weighty_repository, tmp_path, lambda _: None)).get("gpt")
    assert model.tables is None
    for feeds in (feeds_of(1, 1, 49), feeds_of(1, 40, 3), feeds_of(3, 1, 1, 2, 3)):
        for _ in range(2):  # the second call is bound
            assert model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected(model, feeds)


LOOKUPS = ["alibi-7x256x9000", "llama-300x64"]
"""Stored artifacts with rows of one table as `embeddings`. A table of t5 is too small for a data file."""
MEANS = [NumpyMeans, *([KernelMeans] if BUILT else [])]
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


@pytest.mark.parametrize("kind", MEANS)
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


@built
@pytest.mark.parametrize("width", [1, 5, 33, 256])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 1, 300, 2, 64], [5000]])
def test_means_equal_loop_in_float64(width: int, lengths: list[int]) -> None:
    table = values_of_every_size(50, width)
    ids = TokenRows(np.random.default_rng(width).integers(0, 50, sum(lengths)), np.array(lengths))
    assert LookupTable(table).means(ids).tobytes() == expected_means(table[ids.values], ids.lengths).tobytes()


@built
def test_only_bare_lookups_have_a_table(tmp_path: Path) -> None:
    names = {name: name for name in (*LOOKUPS, "t5", "bert", "gemma", "sinusoid", "segments")}
    repository = Repository(make_repository(tmp_path, **names))
    assert [name for name in names if repository.get(name).lookup_table is not None] == LOOKUPS


GATHERS = [NumpyGather, *([KernelGather] if BUILT else [])]


def cut(table: NDArray[np.uint8], *ends: int) -> list[memoryview]:
    """Return a table in parts, cut at these rows."""
    return [memoryview(part.tobytes()) for part in np.split(table, ends)]


@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("row_bytes", [1, 63, 64, 65, 160, 5120])
@pytest.mark.parametrize("tokens", [0, 1, 400])
def test_rows_of_several_tables_in_parts(kind: type[Gather], row_bytes: int, tokens: int) -> None:
    random = np.random.default_rng([row_bytes, tokens])
    first = random.integers(0, 256, (100, row_bytes), np.uint8)
    second = random.integers(0, 256, (73, row_bytes), np.uint8)
    gather = kind([cut(first, 1, 40, 41, 99), cut(second)], row_bytes)
    ids = np.stack((random.integers(0, 100, (tokens, 3)), random.integers(0, 73, (tokens, 3))), 1)
    ids[:1, 0], ids[:1, 1] = [0, 99, 40], [0, 72, 1]
    out = np.full((tokens, 2, 3, row_bytes), 7, np.uint8)
    gather.run(ids, out)
    assert np.array_equal(out[:, 0], first[ids[:, 0]])
    assert np.array_equal(out[:, 1], second[ids[:, 1]])


@pytest.mark.parametrize("kind", GATHERS)
def test_gathered_id_without_a_row_is_rejected(kind: type[Gather]) -> None:
    tables = [cut(np.ones((9, 8), np.uint8)), cut(np.ones((5, 8), np.uint8), 2)]
    for id_ in (-1, 5, 2**63 - 1, -(2**63)):
        for at in (0, 3):
            ids, out = np.zeros((4, 2, 1), np.int64), np.full((4, 2, 1, 8), 7, np.uint8)
            ids[at, 1] = id_
            with pytest.raises(IndexError, match=f"^id: got {id_}, expected 0 to 4$"):
                kind(tables, 8).run(ids, out)
            assert (out[at, 1] == 7).all()


def write_table(file: Path, rows: int, row_bytes: int = 160) -> NDArray[np.uint8]:
    """Write a table of random rows, and return it."""
    table = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), np.uint8)
    file.write_bytes(table.tobytes())
    return table


def test_threads_gather_rows_of_their_own(tmp_path: Path) -> None:
    table, memory = write_table(tmp_path / "t", 5000), TableMemory()
    rows = StoredRows([[memory.map(tmp_path / "t")]], np.dtype(np.uint8), 160, memory)
    calls = [np.random.default_rng(seed).integers(0, 5000, (500, 1, 4)) for seed in range(20)]
    with ThreadPoolExecutor(8) as pool:
        for ids, found in zip(calls, pool.map(rows.gather, calls), strict=True):
            assert np.array_equal(found, table[ids].reshape(500, 1, 640))
    assert memory.take_use()[:2] == (40000, 40000 * 160)


def test_tables_are_mapped_from_the_file_and_shared(tmp_path: Path) -> None:
    write_table(tmp_path / "t", 1000)
    kept = TableMemory().map(tmp_path / "t")
    assert kept.readonly
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.endswith(str(tmp_path / "t"))] == ["r--s"]


@pytest.mark.parametrize("content", [None, b""])
def test_file_without_content_is_no_table(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"^t: got a file that cannot be mapped .*, expected a readable file"):
        TableMemory().map(tmp_path / "t")


@built
def test_shorter_file_is_an_error(tmp_path: Path) -> None:
    table, memory = write_table(tmp_path / "t", 5000), TableMemory()
    rows = StoredRows([[memory.map(tmp_path / "t")]], np.dtype(np.uint8), 160, memory)
    os.truncate(tmp_path / "t", 160 * 1000)
    for tokens in (1, 4000):  # the second call releases the GIL
        with pytest.raises(BufferError, match=r"^table: got a file that has become shorter, expected all its rows"):
            rows.gather(np.arange(4999, 4999 - tokens, -1).reshape(-1, 1, 1))
    ids = np.arange(900).reshape(-1, 1, 1)
    assert np.array_equal(rows.gather(ids), table[ids].reshape(-1, 1, 160))


BUDGETED = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.runtime.ngram_rows import StoredRows
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory, read_file_pages
memory = TableMemory(int(sys.argv[2]) or None)
before = read_file_pages()
rows = StoredRows([[memory.map(Path(sys.argv[1]))]], np.dtype(np.uint8), 160, memory)
random, peak = np.random.default_rng(0), 0
for _ in range(25):
    rows.gather(random.integers(0, 6_000_000, (100, 1, 18)))
    assert abs(memory.resident_bytes - (read_file_pages() - before)) < 2**23
    peak = max(peak, read_file_pages() - before)
print(peak)
"""


def test_budget_bounds_resident_pages(tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    os.truncate(tmp_path / "t", 160 * 6_000_000)

    def peak(budget: int) -> int:
        command = [sys.executable, "-c", BUDGETED, str(tmp_path / "t"), str(budget)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout)

    assert peak(0) > 1.2 * MIN_BUDGET_BYTES
    assert peak(MIN_BUDGET_BYTES) <= 1.1 * MIN_BUDGET_BYTES
