"""Rotary outputs of an artifact: its graphs, their proof, and where they are left out."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from preblock.export.errors import ExportError, ParityError
from preblock.export.exporter import export
from preblock.export.parity import prove_rotary
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.service.artifacts.io import describe, read, write
from preblock.service.artifacts.manifest import Manifest, Rotary
from preblock.service.artifacts.names import EMBEDDINGS_GRAPH, GRAPH
from preblock.service.core.types import Int64
from preblock.service.runtime.session import Session
from tests.support.shared import Shared

V, D, R = 40, 16, 8
FAR = 131072


def checkpoint(folder: Path, **rope: Any) -> str:
    """Save a tiny llama of long inputs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=FAR,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default", **rope},
    )
    transformers.LlamaModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def artifact(shared: Shared) -> Path:
    """The artifact of a tiny llama."""
    return shared.build("rotary", lambda root: export(checkpoint(root / "source"), "llama", root).folder)


def feeds(batch: int, length: int, *offset: int) -> dict[str, Int64]:
    return {"input_ids": np.arange(batch * length).reshape(batch, length) % V, "offset": np.array(offset)}


def frontend_of(artifact: Path) -> FrontEnd:
    document = read(Manifest, artifact / "manifest.json").front_end
    assert document is not None
    return FrontEnd(FrontEndConfig.from_document(document)).eval()


def test_rotary_artifact_has_graphs_with_and_without_rotary(artifact: Path) -> None:
    manifest = read(Manifest, artifact / "manifest.json")
    assert set(manifest.files) == {"model.onnx", "embeddings.onnx", "model.onnx.data"}
    vectors = ("embeddings", ("batch", "length", D))
    rotary = [("rotary_cos", ("offsets", "length", R)), ("rotary_sin", ("offsets", "length", R))]
    whole, alone = manifest.graphs[GRAPH], manifest.graphs[EMBEDDINGS_GRAPH]
    assert [(spec.name, spec.shape) for spec in whole.outputs] == [vectors, *rotary]
    assert (alone.inputs, [(spec.name, spec.shape) for spec in alone.outputs]) == (whole.inputs, [vectors])
    assert manifest.rotary == (Rotary(cos="rotary_cos", sin="rotary_sin", width=R, layout="half", max_len=None),)
    assert {node.op_type for node in onnx.load(artifact / EMBEDDINGS_GRAPH).graph.node} == {"Gather"}
    assert frontend_of(artifact).config.rotary == (RotaryOutput(config=RotaryConfig(dim=R, theta=5e5)),)


@pytest.mark.parametrize("offset", [(0,), (FAR - 9,), (3, 70_000), (0, FAR - 9)])
def test_rotary_outputs_have_one_row_per_offset(artifact: Path, offset: tuple[int, ...]) -> None:
    values = feeds(2, 9, *offset)
    found = Session(artifact).run(values)
    expected = frontend_of(artifact).rotary_outputs(*map(torch.from_numpy, values.values()))
    assert list(found) == ["embeddings", *expected]
    for name, tensor in expected.items():
        assert found[name].shape == (len(offset), 9, R)
        assert np.abs(found[name] - tensor.numpy()).max() <= 2.0**-24  # half of the allowed error


def test_rotary_outputs_are_equal_for_every_call_shape(artifact: Path) -> None:
    session, positions = Session(artifact), np.arange(70_000, 70_300)
    whole = session.run(feeds(1, 300, 70_000))
    rows = session.run({"input_ids": np.zeros((300, 1), np.int64), "offset": positions})
    for name in ("rotary_cos", "rotary_sin"):
        assert np.array_equal(rows[name][:, 0], whole[name][0])
        for length in (1, 3, 7):
            for start in range(0, 300 - length, 31):
                part = session.run(feeds(1, length, 70_000 + start))
                assert np.array_equal(part[name][0], whole[name][0, start : start + length])


def test_verify_accepts_rotary_artifact(artifact: Path) -> None:
    verify(artifact)


def change(artifact: Path, copy: Path, name: str, old: str, new: str) -> Path:
    """Copy the artifact with another operator in a graph, and with its new hash in the manifest."""
    folder = shutil.copytree(artifact, copy)
    model = onnx.load(folder / name, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == old)
    node.op_type = new
    onnx.save(model, folder / name)
    manifest = read(Manifest, folder / "manifest.json")
    files = manifest.files | {name: describe(folder / name)}
    write(manifest.model_copy(update={"files": files}), folder / "manifest.json")
    return folder


def test_verify_detects_changed_rotary_output(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="rotary_sin of the graph differs from its reference by"):
        verify(change(artifact, tmp_path / "1", GRAPH, "Sin", "Cos"))


def test_proof_detects_changed_graph_without_rotary(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "1")
    model = onnx.load(folder / EMBEDDINGS_GRAPH, load_external_data=False)
    (gather,) = model.graph.node
    gather.output[0] = "looked_up"
    model.graph.node.append(onnx.helper.make_node("Neg", ["looked_up"], ["embeddings"]))
    onnx.save(model, folder / EMBEDDINGS_GRAPH)
    with pytest.raises(ParityError, match="the graph of embeddings alone differs at batch 1, length 1"):
        prove_rotary(TorchReference(frontend_of(folder)), Session(folder), Session(folder, graph=EMBEDDINGS_GRAPH))


@pytest.mark.parametrize("changes", [{"theta": 5.0001e5}, {"scaling": "linear", "factor": 1.00001}])
def test_rotary_proof_detects_slightly_different_frequencies(artifact: Path, changes: dict[str, Any]) -> None:
    config = frontend_of(artifact).config
    (output,) = config.rotary
    other = replace(config, rotary=(replace(output, config=replace(output.config, **changes)),))
    with pytest.raises(ParityError, match=r"rotary_(cos|sin) of the graph differs"):
        prove_rotary(TorchReference(FrontEnd(other)), Session(artifact), Session(artifact, graph=EMBEDDINGS_GRAPH))


def test_length_dependent_rotary_needs_rotary_length(tmp_path: Path) -> None:
    reports: list[str] = []
    source = checkpoint(tmp_path / "llama", rope_type="dynamic", factor=4.0)
    left_out = export(source, "left-out", tmp_path, reports.append)
    assert any("leaving rotary outputs out: rope_type 'dynamic' depends on the length" in line for line in reports)
    assert not (left_out.folder / EMBEDDINGS_GRAPH).exists()
    assert [spec.name for spec in left_out.manifest.graphs[GRAPH].outputs] == ["embeddings"]

    exported = export(source, "long", tmp_path, max_len=4 * FAR, rotary_length=2 * FAR)
    verify(exported.folder)
    frontend = frontend_of(exported.folder)
    assert (frontend.signature.max_len, frontend.signature.rotary_len) == (4 * FAR, 2 * FAR)
    found = Session(exported.folder).run(feeds(1, 5, 2 * FAR - 5))
    for name, tensor in frontend.rotary_outputs(torch.zeros((1, 5), dtype=torch.int64), 2 * FAR - 5).items():
        assert np.abs(found[name] - tensor.numpy()).max() <= 2.0**-23


def test_needless_rotary_length_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--rotary-length is only for published checkpoints"):
        export("gpt2-small", "m", tmp_path, rotary_length=9)
    with pytest.raises(ExportError, match="--rotary-length: the angles of 'llama' here do not"):
        export(checkpoint(tmp_path / "llama"), "m", tmp_path, rotary_length=9)


def test_scaled_rotary_outputs_are_verified(tmp_path: Path) -> None:
    source = checkpoint(
        tmp_path / "llama", rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, attention_factor=3.3
    )
    verify(export(source, "yarn", tmp_path).folder)
