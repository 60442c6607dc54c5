"""Rotary outputs of another width for each kind of layer. Oracle: the rotary module of Gemma 4 in transformers."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor
from transformers import Gemma4TextConfig, Gemma4TextModel

import preblock
from preblock.export.exporter import ExportResult, export
from preblock.export.layouts.conversion import convert
from preblock.export.verification import verify
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import GRAPH
from tests.support.servers import serve
from tests.support.shared import Shared

WIDTHS = {"full_attention": 32, "sliding_attention": 8}
MAX_LEN, OFFSET, LENGTH = 4000, 3100, 900
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
    "max_position_embeddings": MAX_LEN,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
CONFIG = Gemma4TextConfig(**SIZES)
TOLERANCE = 2.0**-23
FORMS: tuple[Literal["full", "half", "fused"], ...] = ("full", "half", "fused")


@pytest.fixture(scope="module")
def rotary_checkpoint(shared: Shared) -> str:
    torch.manual_seed(0)
    return str(shared.make("widths checkpoint", Gemma4TextModel(CONFIG).save_pretrained))


@pytest.fixture(scope="module", params=FORMS)
def exported(rotary_checkpoint: str, shared: Shared, request: pytest.FixtureRequest) -> ExportResult:
    form = request.param
    return shared.build(f"widths {form}", lambda root: export(rotary_checkpoint, "m", root, rotary_layout=form))


def library(positions: Tensor, form: str, dtype: torch.dtype = torch.float32) -> dict[str, NDArray[Any]]:
    """Return the cosines and sines of transformers by the names and in the form of our outputs."""
    module = Gemma4TextModel(CONFIG).rotary_emb
    found: dict[str, NDArray[Any]] = {}
    for kind, width in WIDTHS.items():
        cos, sin = module(torch.zeros(1, dtype=dtype), positions, kind)
        assert cos.shape[-1] == width
        if form != "full":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        parts = {"cos_sin": torch.cat((cos, sin), dim=-1)} if form == "fused" else {"cos": cos, "sin": sin}
        found |= {f"rotary_{part}_{kind}": values.numpy() for part, values in parts.items()}
    return found


def form_of(result: ExportResult) -> str:
    assert isinstance(result.manifest, Manifest)
    return result.manifest.rotary[0].form


def run_graph(folder: Path, offset: int, length: int) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(folder / GRAPH)
    names = [node.name for node in session.get_outputs() if node.name.startswith("rotary")]
    feeds = {"input_ids": np.zeros((1, length), np.int64), "offset": np.array([offset])}
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_module_matches_library_bit_for_bit(rotary_checkpoint: str) -> None:
    frontend = FrontEnd.from_data(read_frontend(Path(rotary_checkpoint)))
    found = frontend.rotary_outputs(torch.zeros((1, LENGTH), dtype=torch.int64), OFFSET)
    expected = library(torch.arange(OFFSET, OFFSET + LENGTH)[None], "full")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].numpy(), values)


def test_graph_has_width_of_each_kind_of_layer(exported: ExportResult) -> None:
    found = run_graph(exported.folder, OFFSET, LENGTH)
    expected = library(torch.arange(OFFSET, OFFSET + LENGTH)[None], form_of(exported))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=TOLERANCE)


def test_manifest_states_widths_and_is_verified(exported: ExportResult) -> None:
    assert isinstance(exported.manifest, Manifest)
    assert {kind: rotary.width for kind, rotary in zip(WIDTHS, exported.manifest.rotary, strict=True)} == WIDTHS
    assert all(rotary.cos.endswith(kind) for kind, rotary in zip(WIDTHS, exported.manifest.rotary, strict=True))
    assert exported.manifest.front_end is not None
    config = FrontEndConfig.from_document(exported.manifest.front_end)
    assert config.no_rotary is None
    assert config.rotary[0].config == RotaryConfig(
        dim=32, theta=1e6, scaling="proportional", factor=1.0, turning_pairs=4
    )
    verify(exported.folder)


def test_float16_outputs_are_rounded_once(rotary_checkpoint: str, exported: ExportResult, tmp_path: Path) -> None:
    form: Any = form_of(exported)
    narrow = export(rotary_checkpoint, "m", tmp_path, rotary_layout=form, rotary_dtype="float16")
    found, wide = (run_graph(result.folder, OFFSET, LENGTH) for result in (narrow, exported))
    expected = library(torch.arange(OFFSET, OFFSET + LENGTH)[None], form, torch.float16)
    for name, values in expected.items():
        assert found[name].dtype == np.float16
        assert np.array_equal(found[name], wide[name].astype(np.float16))
        # The float32 cosines of two libraries differ in the last bit, and then round to different neighbours.
        assert (found[name] != values).mean() < 1e-3
        np.testing.assert_allclose(found[name], values, rtol=2.0**-10, atol=2.0**-24)


def test_service_takes_positions_and_offsets(exported: ExportResult) -> None:
    positions = [[7, 3, 3999, 0], [1, 2, 3, 4]]
    wanted = library(torch.tensor(positions), form_of(exported))
    rows = library(torch.tensor([[5, 6, 7, 8], [90, 91, 92, 93]]), form_of(exported))
    ids = [[0] * 4, [1] * 4]
    with serve(exported.folder.parent.parent) as server, preblock.connect(server.address) as client:
        for name in wanted:
            found = client.embed(ids, model="m", position_ids=positions, output=name).vectors
            np.testing.assert_allclose(found, wanted[name], rtol=0, atol=TOLERANCE)
            found = client.embed(ids, model="m", offset=[5, 90], output=name).vectors
            np.testing.assert_allclose(found, rows[name], rtol=0, atol=TOLERANCE)


def test_edgellm_caches_have_widths_of_both_kinds(exported: ExportResult, tmp_path: Path) -> None:
    convert(exported.folder, "edgellm", tmp_path)
    caches = load_file(tmp_path / "rope_rotary_cos_sin.safetensors")
    expected = library(torch.arange(MAX_LEN)[None], "fused")
    assert caches.keys() == {"rope_rotary_cos_sin_full", "rope_rotary_cos_sin_sliding"}
    for kind, width in WIDTHS.items():
        cache = caches[f"rope_rotary_cos_sin_{kind.removesuffix('_attention')}"]
        assert cache.shape == (1, MAX_LEN, width)
        assert cache.dtype == np.float32
        np.testing.assert_allclose(cache, expected[f"rotary_cos_sin_{kind}"], rtol=0, atol=TOLERANCE)
