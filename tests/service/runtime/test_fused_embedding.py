"""Sums made in one pass. Oracle: NumPy, which multiplies, rounds, adds and rounds; and the graph, by onnxruntime."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.external_data_helper import set_external_data
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor, make_tensor_value_info

from preblock.service.artifacts.manifest import POSITIONED_GRAPH
from preblock.service.artifacts.onnx_match import Summand, summand_of
from preblock.service.runtime.fused_embedding import BUILT, map_tokens
from tests.conftest import ROOT

if BUILT:
    from preblock.service.runtime._fused_embedding import add_rows

built = pytest.mark.skipif(not BUILT, reason="_fused_embedding.c was not built")
Float32 = NDArray[np.float32]


def test_it_is_built_where_there_is_a_compiler() -> None:
    assert BUILT or shutil.which("cc") is None


def summed(ids: NDArray[np.int64], table: Float32, scale: float, positions: Float32) -> Float32:
    rows = table[ids.ravel()] * np.float32(scale)
    return np.asarray(rows + np.tile(positions, (ids.size // max(1, len(positions)), 1)), np.float32)


@built
@pytest.mark.parametrize("width", [1, 3, 64, 767, 768])
@pytest.mark.parametrize("scale", [1.0, 22.627416997969522, -0.3])
@pytest.mark.parametrize(("tokens", "placed"), [(0, 0), (0, 3), (1, 1), (2, 1), (3, 3), (4, 2), (5, 5), (36, 9)])
def test_bits_are_those_of_a_product_and_a_sum(width: int, scale: float, tokens: int, placed: int) -> None:
    random = np.random.default_rng([width, tokens])
    scale = float(np.float32(scale))
    table = random.standard_normal((100, width), np.float32)
    positions = random.standard_normal((placed, width), np.float32)
    ids = random.integers(0, 100, tokens)
    ids[:1], ids[-1:] = 99, 0
    out = np.full((tokens, width), 7, np.float32)
    add_rows(ids, table, scale, positions, out, width)
    assert out.tobytes() == summed(ids, table, scale, positions).tobytes()


@built
@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, -np.inf, 1e-45, -3e38])
def test_special_values_are_summed_as_others(special: float) -> None:
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
@pytest.mark.parametrize("at", [0, 3, 8])
def test_an_id_without_a_row_is_refused_before_anything_is_written(id_: int, at: int) -> None:
    ids, table, positions = np.arange(9), np.ones((100, 4), np.float32), np.ones((3, 4), np.float32)
    ids[at] = id_
    out = np.full((9, 4), 7, np.float32)
    with pytest.raises(IndexError, match=f"id: got {id_}, allowed 0 to 99"):
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
def test_sizes_that_do_not_fit_are_refused(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
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
    with pytest.raises(ValueError, match=r"width: got .*, allowed whole rows"):
        add_rows(*given.values())
    assert (out == 7).all()


@built
def test_memory_that_cannot_be_read_or_written_in_order_is_refused() -> None:
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
def test_ids_may_lie_anywhere_and_floats_only_where_floats_may() -> None:
    ids, table, positions = np.arange(9), np.ones((9, 4), np.float32), np.ones((3, 4), np.float32)
    odd = np.frombuffer(b"." + ids.tobytes(), np.int64, offset=1)
    out = np.zeros((9, 4), np.float32)
    add_rows(odd, table, 1.0, positions, out, 4)
    assert (out == 2).all()
    for place in (1, 3, 4):
        given: list[Any] = [ids, table, 1.0, positions, out, 4]
        given[place] = np.zeros(given[place].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(given[place].shape)
        with pytest.raises(ValueError, match="floats: got an odd address"):
            add_rows(*given)


def test_the_table_of_a_model_is_found(repository: Path) -> None:
    folder, positions = repository / "gpt2-small/1", np.zeros((1, 1024, 768), np.float32)
    assert (map_tokens(folder, positions) is not None) == BUILT
    assert map_tokens(repository / "minilm/1", positions[..., :384]) is None
    assert map_tokens(folder, positions[..., :767]) is None
    odd = np.zeros(4 * 768 + 1, np.uint8)[1:].view(np.float32).reshape(1, 1, 768)
    assert map_tokens(folder, odd) is None
    assert summand_of(repository / "transformer-base/1") == Summand(0, (32000, 512), float(np.float32(512**0.5)))


Gather, Mul, Add = (
    make_node("Gather", ["table", "input_ids"], ["rows"]),
    make_node("Mul", ["rows", "factor"], ["scaled"]),
    make_node("Add", ["scaled", "position_embeddings"], ["embeddings"]),
)
PLAIN = make_node("Add", ["rows", "position_embeddings"], ["embeddings"])


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([Gather, PLAIN], 1.0),
        ([Gather, make_node("Add", ["position_embeddings", "rows"], ["embeddings"])], 1.0),
        ([Gather, Mul, Add], 0.5),
        ([Gather, make_node("Mul", ["factor", "rows"], ["scaled"]), Add], 0.5),
        ([make_node("Gather", ["table", "input_ids"], ["rows"], axis=0), PLAIN], 1.0),
        ([make_node("Gather", ["table", "input_ids"], ["rows"], axis=1), PLAIN], None),
        ([make_node("Gather", ["table", "token_type_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["inside", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["half", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["unaligned", "input_ids"], ["rows"]), PLAIN], None),
        ([Gather, make_node("Sub", ["rows", "position_embeddings"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "rows"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "position_embeddings"], ["summand"])], None),
        ([Gather, make_node("Mul", ["rows", "several"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "double"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "rows"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["factor", "factor"], ["scaled"]), Add], None),
        ([Gather, Mul, PLAIN], None),
        ([Gather, PLAIN, make_node("Neg", ["embeddings"], ["summand"])], None),
        ([Gather, make_node("Mul", ["rows", "factor"], ["scaled"], domain="other"), Add], None),
    ],
)
def test_only_rows_of_a_table_times_a_number_are_a_table(
    tmp_path: Path, nodes: list[onnx.NodeProto], found: float | None
) -> None:
    tensors = [
        make_tensor("factor", TensorProto.FLOAT, [], [0.5]),
        make_tensor("double", TensorProto.DOUBLE, [], [0.5]),
        make_tensor("several", TensorProto.FLOAT, [4], [0.5] * 4),
        make_tensor("inside", TensorProto.FLOAT, [9, 4], [0.5] * 36),
    ]
    for name, kind, offset in (
        ("table", TensorProto.FLOAT, 64),
        ("unaligned", TensorProto.FLOAT, 66),
        ("half", TensorProto.FLOAT16, 64),
    ):
        tensor = make_tensor(name, kind, [9, 4], b"\0" * 144 if kind == TensorProto.FLOAT else b"\0" * 72, raw=True)
        set_external_data(tensor, "model.onnx.data", offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensors.append(tensor)
    inputs = [make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])]
    outputs = [make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", "length", 4])]
    graph = make_graph(nodes, "sums", inputs, outputs, tensors)
    model = make_model(graph, opset_imports=[make_opsetid("", 18)])
    (tmp_path / POSITIONED_GRAPH).write_bytes(model.SerializeToString())
    assert summand_of(tmp_path) == (None if found is None else Summand(64, (9, 4), found))


SERVES = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.app import create_engine
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.core.settings import Settings
model = create_engine(Settings(repository=Path(sys.argv[1]))).repository.get("gpt2-small")
feeds = {"input_ids": np.arange(600).reshape(2, 300) * 83, "offset": np.array([7])}
expected = model.sessions["model.onnx"].run(feeds)["embeddings"].tobytes()
assert all(model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected for _ in range(20))
print(BUILT, model.tokens is not None)
"""


@pytest.mark.parametrize("compiler", ["cc", "/nonexistent"])
def test_a_package_is_built_and_serves_with_a_compiler_and_without(
    tmp_path: Path, repository: Path, compiler: str
) -> None:
    if shutil.which(compiler) is None and compiler == "cc":
        pytest.skip("there is no compiler")
    tree = tmp_path / "tree"
    for name in ("preblock", "models", "export", "service"):
        ignored = shutil.ignore_patterns("__pycache__", "_fused_embedding.*so")
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "hatch_build.py"):
        shutil.copy(ROOT / name, tree)
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    told = subprocess.run(
        build, cwd=tree, env=os.environ | {"CC": compiler}, capture_output=True, text=True, check=True
    ).stderr
    (wheel,) = tmp_path.glob("*.whl")
    works = compiler == "cc"
    assert wheel.name.endswith("-py3-none-any.whl") != works
    assert ("was not built: onnxruntime will do its work" in told) != works
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "there")
    # From a folder without a checkout, which Python would import from first.
    run: list[str | Path] = [sys.executable, "-c", SERVES, repository]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(works), str(works)]
    assert ("installed without a C compiler" in done.stderr) != works
