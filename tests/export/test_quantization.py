"""Quantized exports: graphs, reports and verification. Oracles: NumPy, and the ONNX standard."""

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import transformers
from numpy.typing import NDArray

from preblock.export.errors import ExportError, ParityError
from preblock.export.exporter import ExportResult, export, export_loaded
from preblock.export.options import resolve
from preblock.export.outputs import OUTPUTS
from preblock.export.quantization import compare_tables
from preblock.export.reference import NumpyReference
from preblock.export.source import LoadedSource, load_source
from preblock.export.stored_tables import read_data
from preblock.export.table_formats import find_format
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData
from preblock.models.steps import Norm, Positions, Project, Segments, Tokens
from preblock.service.artifacts.io import describe, read
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import DATA, EMBEDDINGS, GRAPH, MANIFEST, PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.support.servers import serve
from tests.support.shared import Shared

V, D, M = 90, 40, 24
"""The width is no multiple of a block."""
WAYS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "int8-tensor": {"dtype": "int8", "scale": "tensor"},
    "int4": {"dtype": "int4"},
}
ALL = pytest.mark.parametrize("way", WAYS)

Array = NDArray[Any]


def steps(values: Array, levels: int) -> Array:
    """Round `values` to whole steps; the largest value is `levels` steps."""
    step = np.abs(values).max() / np.float32(levels)
    whole: Array = np.rint(values / step) * step
    return whole


def rounded(table: Array, way: str) -> Array:
    """Return `table` after rounding to its stored type."""
    if way == "int8":
        return np.stack([steps(row, 127) for row in table])
    if way == "int8-tensor":
        return steps(table, 127)
    if way == "int4":
        blocks = range(0, table.shape[1], 32)
        return np.stack([np.concatenate([steps(row[at : at + 32], 7) for at in blocks]) for row in table])
    short: Array = table.astype(getattr(ml_dtypes, way, np.float16)).astype(np.float32)
    return short


def run(folder: Path, feeds: dict[str, Array], graph: str = GRAPH) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(folder / graph, options, providers=["CPUExecutionProvider"])
    found: Array = session.run(None, feeds)[0]
    return found


def seal(folder: Path, **values: Any) -> None:
    """Give the manifest the hashes of the files as they are now, and other values."""
    manifest = json.loads((folder / MANIFEST).read_text()) | values
    manifest["files"] = {name: describe(folder / name).model_dump() for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def tiny(*further: Any) -> FrontEnd:
    torch.manual_seed(0)
    steps_ = (Tokens(rows=30, width=8), *further)
    return FrontEnd(FrontEndConfig(family="tiny", steps=steps_, max_len=20))


def put(frontend: FrontEnd, root: Path, dtype: str) -> ExportResult:
    return export_loaded(LoadedSource(frontend.data(), Source(kind="module")), "m", root, format_=find_format(dtype))


@pytest.fixture(scope="module")
def quantized_source(shared: Shared) -> Path:
    """The folder of a random GPT-2 in float32."""

    def save(root: Path) -> None:
        torch.manual_seed(4)
        config = transformers.GPT2Config(vocab_size=V, n_embd=D, n_positions=M, n_layer=1, n_head=2)
        transformers.GPT2Model(config).save_pretrained(root / "gpt2")

    return shared.make("quantized checkpoint", save) / "gpt2"


@pytest.fixture(scope="module")
def quantized_repository(quantized_source: Path, shared: Shared) -> Path:
    """The same GPT-2, stored in every format."""

    def fill(root: Path) -> None:
        for way, options in WAYS.items():
            export(str(quantized_source), way, root, **options)

    return shared.make("quantized", fill)


@pytest.fixture(scope="module")
def quantized_tables(quantized_source: Path) -> tuple[Array, Array]:
    """Its tables of tokens and positions, as transformers has them."""
    model = transformers.GPT2Model.from_pretrained(quantized_source)
    return model.wte.weight.detach().numpy(), model.wpe.weight.detach().numpy()


@pytest.fixture
def quantized_copy(quantized_repository: Path, tmp_path: Path) -> Path:
    """The repository, to break."""
    return shutil.copytree(quantized_repository, tmp_path / "copy")


@ALL
def test_quantized_graph_matches_numpy_rounding(
    quantized_repository: Path, quantized_tables: tuple[Array, Array], way: str
) -> None:
    folder = quantized_repository / way / "1"
    tokens, positions = (rounded(table, way) for table in quantized_tables)
    for batch, length, offset in ((1, 1, [0]), (2, M, [0]), (2, 3, [1, 20]), (0, 2, [0])):
        ids = np.random.default_rng(1).integers(0, V, (batch, length))
        expected = tokens[ids] + positions[np.arange(length) + np.array(offset)[:, None]]
        found = run(folder, {"input_ids": ids, "offset": np.array(offset)})
        assert found.dtype == np.float32
        assert np.array_equal(found, expected)
        assert np.array_equal(run(folder, {"input_ids": ids}, "token.onnx"), tokens[ids])
    check_standard(folder)


@ALL
def test_quantized_table_is_never_dequantized_as_whole(quantized_repository: Path, way: str, tmp_path: Path) -> None:
    for graph in (GRAPH, "token.onnx"):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(quantized_repository / way / "1" / graph, options, providers=["CPUExecutionProvider"])
        for file in (quantized_repository / way / "1" / graph, tmp_path / "optimised.onnx"):
            model = onnx.load(file, load_external_data=False).graph
            assert {node.op_type for node in model.node if node.input and "weight" in node.input[0]} == {"Gather"}
            floats = [tensor for tensor in model.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
            assert all(np.prod(tensor.dims) <= 2 * V for tensor in floats)
            domains = {node.domain for node in model.node}
            assert file.name == "optimised.onnx" or domains <= {""}


def test_norms_and_projections_stay_in_float32_in_int4_export(tmp_path: Path) -> None:
    frontend = tiny(
        Segments(rows=30), Segments(rows=2, input="kinds"), Positions(rows=20), Norm(eps=1e-5), Project(width=12)
    )
    with torch.no_grad():
        frontend.get_parameter("segments.weight").copy_(frontend.tokens.weight)
        frontend.get_parameter("norm.weight").fill_(1.1)
    exported = put(frontend, tmp_path, "int4")
    types = {t.name: t.data_type for t in onnx.load(exported.folder / GRAPH).graph.initializer}
    for name in frontend.state_dict():
        kept = name.startswith(("norm", "project"))
        assert (name in exported.parity.storage) == (not kept)
        assert types[name] == (onnx.TensorProto.FLOAT if kept else onnx.TensorProto.UINT8), name
    assert verify(exported.folder).providers[CPU].outputs["embeddings"].max_ulp <= 8


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float16", 65520), ("bfloat16", 3.4e38), ("int8", np.inf), ("int4", np.nan), ("float16", -7e4)],
)
def test_weight_beyond_dtype_is_rejected_and_leaves_no_files(tmp_path: Path, dtype: str, value: float) -> None:
    frontend = tiny(Positions(rows=20))
    with torch.no_grad():
        frontend.get_parameter("positions.weight")[3, 2] = value
    with pytest.raises(ExportError) as refused:
        put(frontend, tmp_path, dtype)
    told = f"{np.float32(value):g}"
    assert str(refused.value) == f"--dtype: got {dtype}, expected a type that holds {told}, a value of positions.weight"
    assert list(tmp_path.iterdir()) == []


def test_server_converts_quantized_output_to_requested_dtype(
    quantized_repository: Path, quantized_tables: tuple[Array, Array]
) -> None:
    with serve(quantized_repository) as server:
        for way in WAYS:
            fields = {"input_ids": [[5, 6, 7]], "offset": 2, "dtype": "float16"}
            answer = httpx.post(f"{server.address}/models/{way}/embed", json=fields, timeout=60).json()
            tokens, positions = (rounded(table, way) for table in quantized_tables)
            expected = (tokens[[5, 6, 7]] + positions[2:5]).astype(np.float16)
            assert base64.b64decode(answer["embeddings"]) == expected.tobytes()
        shown = httpx.get(f"{server.address}/models/int4", timeout=60).json()
        assert shown["manifest"]["dtype"] == "int4"
        assert set(shown["parity"]["storage"]) == {"tokens.weight", "positions.weight"}


@ALL
def test_parity_report_compares_tables_with_float32(
    quantized_repository: Path, quantized_tables: tuple[Array, Array], way: str
) -> None:
    folder = quantized_repository / way / "1"
    found = json.loads((folder / PARITY).read_text())["storage"]
    assert list(found) == ["tokens.weight", "positions.weight"]
    for table, told in zip(quantized_tables, found.values(), strict=True):
        exact, stored = table.astype(np.float64), rounded(table, way).astype(np.float64)
        error = np.abs(stored - exact)
        cosines = (exact * stored).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(stored, axis=1)
        assert (told["rows"], told["width"]) == table.shape
        assert told["max_abs"] == error.max() > 0
        assert told["mean_abs"] == pytest.approx(error.mean(), rel=1e-9)
        assert told["min_cosine"] == pytest.approx(cosines.min(), rel=1e-12)
        assert told["bytes"] + told["saved"] == table.nbytes
    assert sum(told["bytes"] for told in found.values()) <= (folder / DATA).stat().st_size + 16


@pytest.mark.parametrize(("way", "ending"), [("float16", ""), *itertools.product(("int8", "int4"), ("", ".scale"))])
def test_compare_tables_detects_other_rounding(
    quantized_copy: Path, quantized_source: Path, way: str, ending: str
) -> None:
    folder, frontend = quantized_copy / way / "1", load_source(resolve(str(quantized_source))).frontend
    format_ = find_format(**WAYS[way])
    assert isinstance(frontend, FrontEndData)
    assert format_ is not None
    told = read(ParityReport, folder / PARITY).storage
    assert compare_tables(frontend, format_, folder) == told
    tensors = {tensor.name: tensor for tensor in onnx.load(folder / GRAPH, load_external_data=False).graph.initializer}
    place = {entry.key: entry.value for entry in tensors[f"tokens.weight{ending}"].external_data}
    content = np.memmap(folder / DATA, np.uint8, "r+", int(place["offset"]), (int(place["length"]),))
    content[-2] ^= 1
    content.flush()
    with pytest.raises(ExportError, match=r"model\.onnx\.data: tokens\.weight differs from its values rounded to "):
        compare_tables(frontend, format_, folder)


def test_parity_of_lookup_only_model_covers_every_id(tmp_path: Path) -> None:
    exported = put(tiny(), tmp_path, "int8")
    output = exported.parity.providers[CPU].outputs[EMBEDDINGS]
    assert output.cases[-1].arguments == {"from_id": 0, "to_id": 29}
    content = bytearray((exported.folder / DATA).read_bytes())
    narrow = NumpyReference(*read_data(exported.folder, tiny().config))
    content[17 * 8] ^= 1
    shutil.copytree(exported.folder, tmp_path / "copy")
    (tmp_path / "copy" / DATA).write_bytes(content)
    with pytest.raises(ParityError, match=r"^embeddings of the graph differs from its reference"):
        OUTPUTS[GRAPH].prove(narrow, Session(tmp_path / "copy"))


@ALL
def test_manifest_with_wrong_dtype_is_rejected(quantized_copy: Path, way: str) -> None:
    seal(quantized_copy / way / "1", dtype="float32")
    stored = {"int8-tensor": "int8", "int4": "uint8"}.get(way, way)
    message = rf"dtype.*{stored}"
    with pytest.raises(ArtifactError, match=message):
        Repository(quantized_copy)
    with pytest.raises(ExportError, match=message):
        verify(quantized_copy / way / "1")
