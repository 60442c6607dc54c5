"""Rotary outputs of an artifact: forms, widths and types, their proof, and where they are left out.

Oracle: transformers.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor
from transformers import Gemma4TextConfig, Gemma4TextModel

import preblock
from preblock.export.errors import ExportError, ParityError
from preblock.export.exporter import ExportResult, export
from preblock.export.layouts.conversion import convert
from preblock.export.parity import prove_rotary
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.service.artifacts.io import read
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS_GRAPH, GRAPH
from preblock.service.core.types import Int64
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.session import Session
from tests.models.rejections import rejection
from tests.support.servers import serve
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


WIDTHS = {"full_attention": 32, "sliding_attention": 8}
LONGEST, OFFSET, LENGTH = 4000, 3100, 900
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "vocab_size_per_layer_input": 40,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": WIDTHS["sliding_attention"],
    "global_head_dim": WIDTHS["full_attention"],
    "max_position_embeddings": LONGEST,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
CONFIG = Gemma4TextConfig(**SIZES)
"""Another width for each kind of layer."""
TOLERANCE = 2.0**-23
Exports = tuple[str, ExportResult, ExportResult]


@pytest.fixture(scope="module", params=["full", "half", "fused"])
def exports(shared: Shared, request: pytest.FixtureRequest) -> Exports:
    """A form, and the artifacts with float32 and with float16 outputs."""
    torch.manual_seed(0)
    source = str(shared.make("widths checkpoint", Gemma4TextModel(CONFIG).save_pretrained))
    options: dict[str, Any] = {"rotary_layout": request.param}
    wide = shared.build(f"widths {request.param}", lambda root: export(source, "m", root, **options))
    options["rotary_dtype"] = "float16"
    narrow = shared.build(f"narrow {request.param}", lambda root: export(source, "m", root, **options))
    return request.param, wide, narrow


def library(positions: Tensor, form: str, dtype: torch.dtype = torch.float32) -> dict[str, NDArray[Any]]:
    """Return the cosines and sines of transformers by the names and in the form of our outputs."""
    module = Gemma4TextModel(CONFIG).rotary_emb
    found: dict[str, NDArray[Any]] = {}
    for kind, width in WIDTHS.items():
        cos, sin = module(torch.zeros(1, dtype=dtype), positions, kind)
        if form != "full":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        parts = {"cos_sin": torch.cat((cos, sin), dim=-1)} if form == "fused" else {"cos": cos, "sin": sin}
        found |= {f"rotary_{part}_{kind}": values.numpy() for part, values in parts.items()}
    return found


def run_graph(result: ExportResult, offset: int, length: int) -> dict[str, NDArray[Any]]:
    """Return all rotary outputs of `model.onnx`, without any code of the service."""
    session = onnxruntime.InferenceSession(result.folder / GRAPH)
    names = [node.name for node in session.get_outputs() if node.name.startswith("rotary")]
    given = {"input_ids": np.zeros((1, length), np.int64), "offset": np.array([offset])}
    return dict(zip(names, session.run(names, given), strict=True))


def test_rotary_graph_matches_transformers_in_each_form(exports: Exports) -> None:
    form, wide, narrow = exports
    positions = torch.arange(OFFSET, OFFSET + LENGTH)[None]
    expected, rounded = library(positions, form), library(positions, form, torch.float16)
    found, short = (run_graph(result, OFFSET, LENGTH) for result in (wide, narrow))
    assert found.keys() == short.keys() == expected.keys()
    for result, dtype in ((wide, "float32"), (narrow, "float16")):
        assert isinstance(result.manifest, Manifest)
        outputs = [(rotary.form, rotary.width, rotary.dtype) for rotary in result.manifest.rotary]
        assert outputs == [(form, width, dtype) for width in WIDTHS.values()]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCE)
        # The float32 cosines of two libraries differ in the last bit, and then round to different neighbours.
        assert (short[name] != rounded[name]).mean() < 1e-3
        np.testing.assert_allclose(short[name], rounded[name], rtol=2.0**-10, atol=2.0**-24)
    for offset in (0, OFFSET, 2**31 - 1000):
        found, short = (run_graph(result, offset, LENGTH) for result in (wide, narrow))
        for name, values in found.items():
            assert short[name].dtype == np.float16
            assert np.array_equal(short[name], values.astype(np.float16))


def test_rotary_outputs_are_served_by_positions_and_offsets(exports: Exports) -> None:
    form, _, narrow = exports
    ids, positions = [[0] * 4, [1] * 4], [[7, 3, 3999, 0], [1, 2, 3, 4]]
    wanted = library(torch.tensor(positions), form, torch.float16)
    rows = library(torch.tensor([[5, 6, 7, 8], [90, 91, 92, 93]]), form, torch.float16)
    with serve(narrow.folder.parent.parent) as server, preblock.connect(server.address) as client:
        for name in wanted:
            for given, expected in (({"position_ids": positions}, wanted), ({"offset": [5, 90]}, rows)):
                for dtype in ("float32", "float16"):
                    found = client.embed(ids, model="m", output=name, dtype=dtype, **given).vectors
                    assert found.dtype == dtype
                    np.testing.assert_allclose(found, expected[name], rtol=2.0**-10, atol=2.0**-24)


def test_edgellm_caches_have_widths_of_both_kinds(exports: Exports, tmp_path: Path) -> None:
    """From each form, for the engine's own order: cosines, then sines."""
    convert(exports[1].folder, "edgellm", tmp_path)
    caches = load_file(tmp_path / "rope_rotary_cos_sin.safetensors")
    expected = library(torch.arange(LONGEST)[None], "fused")
    assert caches.keys() == {"rope_rotary_cos_sin_full", "rope_rotary_cos_sin_sliding"}
    for kind, width in WIDTHS.items():
        cache = caches[f"rope_rotary_cos_sin_{kind.removesuffix('_attention')}"]
        assert cache.shape == (1, LONGEST, width)
        assert cache.dtype == np.float32
        np.testing.assert_allclose(cache, expected[f"rotary_cos_sin_{kind}"], rtol=0, atol=TOLERANCE)


def test_unknown_form_or_type_of_rotary_is_rejected() -> None:
    for field, value, allowed in (("form", "quarter", "full, half, fused"), ("dtype", "bfloat16", "float32, float16")):
        found = rejection(ValueError, RotaryOutput.from_document, {"dim": 8, field: value})
        assert found == f"rotary.{field}: got {value!r}, expected {allowed}"


def test_proof_detects_changed_graph_without_rotary(artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artifact, tmp_path / "1")
    model = onnx.load(folder / EMBEDDINGS_GRAPH, load_external_data=False)
    (gather,) = model.graph.node
    gather.output[0] = "looked_up"
    model.graph.node.append(onnx.helper.make_node("Neg", ["looked_up"], ["embeddings"]))
    onnx.save(model, folder / EMBEDDINGS_GRAPH)
    with pytest.raises(ParityError, match="the graph of embeddings alone differs at batch 1, length 1"):
        prove_rotary(TorchReference(frontend_of(folder)), Session(folder), Session(folder, graph=EMBEDDINGS_GRAPH))


def test_rotary_proof_detects_slightly_different_frequencies(artifact: Path, tmp_path: Path) -> None:
    narrow = export(checkpoint(tmp_path / "llama"), "m", tmp_path, rotary_layout="fused", rotary_dtype="float16").folder
    for folder, changes in (
        (artifact, {"theta": 5.0001e5}),
        (artifact, {"scaling": "linear", "factor": 1.00001}),
        (narrow, {"theta": 5.01e5}),
    ):
        config = frontend_of(folder).config
        (output,) = config.rotary
        other = replace(config, rotary=(replace(output, config=replace(output.config, **changes)),))
        with pytest.raises(ParityError, match=r"rotary_(cos|sin|cos_sin) of the graph differs"):
            prove_rotary(TorchReference(FrontEnd(other)), Session(folder), Session(folder, graph=EMBEDDINGS_GRAPH))


def test_length_dependent_rotary_needs_rotary_length(tmp_path: Path) -> None:
    reports: list[str] = []
    source = checkpoint(tmp_path / "llama", rope_type="dynamic", factor=4.0)
    left_out = export(source, "left-out", tmp_path, reports.append)
    assert any("leaving rotary outputs out: rope_type 'dynamic' depends on the length" in line for line in reports)
    assert not (left_out.folder / EMBEDDINGS_GRAPH).exists()
    assert [spec.name for spec in left_out.manifest.graphs[GRAPH].outputs] == ["embeddings"]
    proven = verify(export(source, "long", tmp_path, max_len=4 * FAR, rotary_length=2 * FAR).folder)
    assert proven.providers[CPU].outputs.keys() == {"embeddings", "rotary_cos", "rotary_sin"}


def test_unfit_rotary_option_is_rejected(tiny_checkpoint: Path, tmp_path: Path) -> None:
    llama, bert = checkpoint(tmp_path / "llama"), str(tiny_checkpoint)
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    large = checkpoint(tmp_path / "large", **yarn, attention_factor=1e5)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("gpt2-small", {"rotary_length": 9}, "--rotary-length is only for published checkpoints"),
        (bert, {"rotary_length": 9}, "--rotary-length: 'bert' here has no rotary"),
        (llama, {"rotary_length": 9}, "--rotary-length: the angles of 'llama' here do not"),
        ("gpt2-small", {"rotary_layout": "half"}, "--rotary-layout: got half, but the model has no rotary outputs: "),
        ("gpt2-small", {"rotary_dtype": "float16"}, "--rotary-dtype: got float16, but the model has no rotary outp"),
        (large, {"rotary_dtype": "float16"}, "--rotary-dtype: rotary.dtype: got 'float16', expected 'float32' for val"),
    ]
    for source, options, message in cases:
        assert message in rejection(ExportError, export, source, "m", tmp_path, **options)
    verify(export(checkpoint(tmp_path / "yarn", **yarn, attention_factor=3.3), "yarn", tmp_path).folder)
