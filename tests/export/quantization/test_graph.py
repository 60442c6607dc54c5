"""Graphs of quantized tables. Oracles: NumPy, and the ONNX standard."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch

from preblock.export.verification import verify
from preblock.models.steps import Norm, Positions, Project, Segments
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY
from preblock.service.runtime.providers import CPU
from tests.clients.client_matrix import check_standard
from tests.export.quantization.rounding import ALL, WAYS, Array, D, M, V, put, rounded, run, tiny


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
def test_manifest_and_data_file_have_quantized_dtype(quantized_repository: Path, way: str) -> None:
    folder = quantized_repository / way / "1"
    manifest = json.loads((folder / MANIFEST).read_text())
    scale = {"int8": "row", "int8-tensor": "tensor", "int4": "block"}.get(way)
    block = 32 if way == "int4" else None
    assert (manifest["dtype"], manifest["scale"], manifest["block"]) == (WAYS[way]["dtype"], scale, block)
    assert {t["dtype"] for graph in manifest["graphs"].values() for t in graph["outputs"]} == {"float32"}
    rows = V + M
    needed = {"float16": 2 * D, "bfloat16": 2 * D, "int8": D + 4, "int8-tensor": D, "int4": 2 * (16 + 4)}[way] * rows
    assert 0 <= (folder / DATA).stat().st_size - needed < 4 * 64  # each part begins at a multiple of 64
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, GRAPH, DATA, PARITY, "token.onnx"]


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
    before = {name: weight.clone() for name, weight in frontend.state_dict().items()}
    exported = put(frontend, tmp_path, "int4")
    assert all(torch.equal(weight, before[name]) for name, weight in frontend.state_dict().items())
    assert set(exported.parity.storage) == {name for name in before if "norm" not in name and "project" not in name}
    types = {t.name: t.data_type for t in onnx.load(exported.folder / GRAPH).graph.initializer}
    for name in before:
        kept = name.startswith(("norm", "project"))
        assert types[name] == (onnx.TensorProto.FLOAT if kept else onnx.TensorProto.UINT8), name
    assert verify(exported.folder).providers[CPU].outputs["embeddings"].max_ulp <= 8
    check_standard(exported.folder)
