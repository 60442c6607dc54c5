"""Parity report and verification of quantized artifacts."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from preblock.export.errors import ExportError, ParityError
from preblock.export.options import resolve
from preblock.export.outputs import OUTPUTS
from preblock.export.quantization import compare_tables
from preblock.export.reference import NumpyReference
from preblock.export.source import load_source
from preblock.export.stored_tables import read_data
from preblock.export.table_formats import find_format
from preblock.export.verification import verify
from preblock.models.frontend_data import FrontEndData
from preblock.service.artifacts.io import read
from preblock.service.artifacts.names import DATA, EMBEDDINGS, GRAPH, PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session
from tests.export.quantization.rounding import ALL, WAYS, Array, put, rounded, seal, tiny


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


@pytest.mark.parametrize("way", ["float16", "int8", "int4"])
@pytest.mark.parametrize("ending", ["", ".scale"])
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
    tensor = tensors.get(f"tokens.weight{ending}")
    if tensor is None:  # a float16 needs no scale
        return
    place = {entry.key: entry.value for entry in tensor.external_data}
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


def test_verify_detects_changed_dequantization(quantized_copy: Path) -> None:
    folder = quantized_copy / "int8" / "1"
    verify(folder)
    model = onnx.load(folder / GRAPH, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Mul").op_type = "Add"
    onnx.save(model, folder / GRAPH)
    seal(folder)
    with pytest.raises(ExportError, match="embeddings of the graph differs from its reference"):
        verify(folder)


def test_verify_detects_wrong_quantization_field_in_manifest(quantized_copy: Path) -> None:
    for way, field, value in (("int8", "scale", "tensor"), ("int8-tensor", "scale", "row"), ("int4", "block", 16)):
        seal(quantized_copy / way / "1", **{field: value})
        with pytest.raises(ExportError, match=rf"manifest\.json: {field} is "):
            verify(quantized_copy / way / "1")


@ALL
def test_manifest_with_wrong_dtype_is_rejected(quantized_copy: Path, way: str) -> None:
    seal(quantized_copy / way / "1", dtype="float32")
    stored = {"int8-tensor": "int8", "int4": "uint8"}.get(way, way)
    message = rf"dtype.*{stored}"
    with pytest.raises(ArtifactError, match=message):
        Repository(quantized_copy, CPU, 1)
    with pytest.raises(ExportError, match=message):
        verify(quantized_copy / way / "1")
