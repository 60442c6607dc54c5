"""Sums made in one pass. Oracle: NumPy, which multiplies, rounds, adds and rounds; and the graph, by onnxruntime."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.fused_embedding import BUILT, FusedLookup
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.runner import Feeds

if BUILT:
    from preblock.service.runtime._kernels import add_rows

built = pytest.mark.skipif(not BUILT, reason="_fused_embedding.c was not built")
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


@built
@pytest.mark.parametrize("id_", [-1, 100, 2**63 - 1, -(2**63)])
def test_id_without_a_row_is_rejected_before_any_write(id_: int) -> None:
    table, positions = np.ones((100, 4), np.float32), np.ones((3, 4), np.float32)
    for at in (0, 3, 8):
        ids, out = np.arange(9), np.full((9, 4), 7, np.float32)
        ids[at] = id_
        with pytest.raises(IndexError, match=f"id: got {id_}, expected 0 to 99"):
            add_rows(ids, table, 1.0, positions, out, 4)
        assert (out == 7).all()


@built
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ids", lambda given: given["ids"][:-1]),
        ("ids", lambda given: given["ids"].view(np.uint8)[:-1]),
        ("table", lambda given: given["table"].ravel()[:-1]),
        ("positions", lambda given: given["positions"][:2]),
        ("positions", lambda given: given["positions"][:0]),
        ("positions", lambda given: given["positions"].ravel()[:-1]),
        ("out", lambda given: given["out"][:-1]),
        ("width", lambda _: 0),
        ("width", lambda _: -4),
        ("width", lambda _: 2**62),
        ("width", lambda _: 5),
        ("width", lambda _: 2),
    ],
)
def test_mismatching_sizes_are_rejected(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    given: dict[str, Any] = {
        "ids": np.arange(9),
        "table": np.ones((100, 4), np.float32),
        "scale": 1.0,
        "positions": np.ones((3, 4), np.float32),
        "out": np.full((9, 4), 7, np.float32),
        "width": 4,
    }
    out = given["out"]
    given[name] = change(given)
    with pytest.raises(ValueError, match=r"width: got .*, expected whole rows"):
        add_rows(*given.values())
    assert (out == 7).all()


@built
def test_non_contiguous_or_read_only_memory_is_rejected() -> None:
    ids, table, positions = np.arange(4), np.ones((9, 4), np.float32), np.ones((2, 4), np.float32)
    out = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        add_rows(np.arange(8)[::2], table, 1.0, positions, out, 4)
    with pytest.raises(TypeError, match="argument 5 must be read-write"):
        add_rows(ids, table, 1.0, positions, np.zeros((4, 8), np.float32)[:, ::2], 4)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="argument 5 must be read-write"):
        add_rows(ids, table, 1.0, positions, out, 4)
    assert not out.any()


@built
def test_unaligned_ids_are_accepted_but_not_floats() -> None:
    ids, table, positions = np.arange(9), np.ones((9, 4), np.float32), np.ones((3, 4), np.float32)
    odd = np.frombuffer(b"." + ids.tobytes(), np.int64, offset=1)
    out = np.zeros((9, 4), np.float32)
    add_rows(odd, table, 1.0, positions, out, 4)
    assert (out == 2).all()
    for place in (1, 3, 4):
        given: list[Any] = [ids, table, 1.0, positions, out, 4]
        given[place] = np.zeros(given[place].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(given[place].shape)
        with pytest.raises(ValueError, match="expected a multiple of 4"):
            add_rows(*given)


@pytest.fixture
def model(weighty_repository: Path) -> TokenModel:
    return Repository(weighty_repository).get("gpt")


def feeds_of(batch: int, length: int, *offsets: int) -> dict[str, NDArray[np.int64]]:
    random = np.random.default_rng([batch, length, *offsets])
    return {"input_ids": random.integers(0, 100, (batch, length)), "offset": np.array(offsets)}


def expected(model: TokenModel, feeds: dict[str, NDArray[np.int64]]) -> bytes:
    return model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()


class Refusing:
    """Stands for the runner of calls outside the kernel."""

    def run(self, _: Feeds, __: Sequence[str]) -> dict[str, Float32]:
        raise LookupError


@built
def test_fused_lookup_equals_plain_graph(model: TokenModel) -> None:
    assert model.tables is not None
    kernel = FusedLookup(model.tables, Refusing())
    for batch, length in ((1, 1), (3, 7), (1, 40), (200, 1), (4, 30)):
        for offset in (0, 3, 10):
            feeds = feeds_of(batch, length, offset)
            found = kernel.run(feeds, ["embeddings"])["embeddings"]
            assert found.shape == (batch, length, 32)
            assert found.tobytes() == expected(model, feeds)
    for offsets in ((0, 49), (49, 3, 3), tuple(range(50))):
        feeds = feeds_of(len(offsets), 1, *offsets)
        assert kernel.run(feeds, ["embeddings"])["embeddings"].tobytes() == expected(model, feeds)


@built
@pytest.mark.parametrize(("batch", "length", "offsets"), [(2, 2, (0, 1)), (0, 3, (0,)), (3, 0, (0,)), (16385, 1, (0,))])
def test_unsupported_calls_are_run_by_session(
    model: TokenModel, batch: int, length: int, offsets: tuple[int, ...]
) -> None:
    assert model.tables is not None
    feeds = feeds_of(batch, length, *offsets)
    with pytest.raises(LookupError):
        FusedLookup(model.tables, Refusing()).run(feeds, ["embeddings"])
    assert model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected(model, feeds)


@built
def test_strided_ids_are_read_in_order(model: TokenModel) -> None:
    feeds = feeds_of(2, 30, 4)
    apart = np.repeat(feeds["input_ids"], 3, axis=1)[:, ::3]
    assert not apart.flags.c_contiguous
    assert model.run(feeds | {"input_ids": apart}, ("embeddings",))["embeddings"].tobytes() == expected(model, feeds)


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
        ("tokens", {"rows": 99}, "kernel.tokens.rows"),
        ("tokens", {"rows": 2**40}, "kernel.tokens.rows"),
        ("tokens", {"begin": 2**50}, "kernel.tokens.rows"),
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
