"""Rotary outputs in the half and the fused form. Oracles: transformers, and onnxruntime's operator RotaryEmbedding."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.service.artifacts.manifest import Manifest
from preblock.service.runtime.session import Session

HEADS, WIDTH, LENGTH, OFFSET = 2, 16, 7, 300
R = WIDTH // HEADS
CONFIG = transformers.LlamaConfig(
    vocab_size=40,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_hidden_layers=1,
    intermediate_size=8,
    max_position_embeddings=4096,
    rope_parameters={"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaModel(CONFIG).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def half(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(checkpoint, "m", tmp_path_factory.mktemp("half"), rotary_layout="half")


@pytest.fixture(scope="module")
def fused(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(checkpoint, "m", tmp_path_factory.mktemp("fused"), rotary_layout="fused")


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of transformers, (1, L, R)."""
    rotary = LlamaRotaryEmbedding(CONFIG)
    cos, sin = rotary(torch.zeros(1), torch.arange(OFFSET, OFFSET + LENGTH)[None])
    return cos, sin


def outputs_of(result: ExportResult) -> dict[str, NDArray[np.float32]]:
    feeds = {"input_ids": np.zeros((1, LENGTH), np.int64), "offset": np.array([OFFSET])}
    found = dict(Session(result.folder).run(feeds))
    del found["embeddings"]
    return found


def test_half_form_matches_half_of_full_values(half: ExportResult) -> None:
    found, (cos, sin) = outputs_of(half), expected()
    assert {name: values.shape for name, values in found.items()} == {
        "rotary_cos": (1, LENGTH, R // 2),
        "rotary_sin": (1, LENGTH, R // 2),
    }
    np.testing.assert_allclose(found["rotary_cos"], cos[..., : R // 2], rtol=0, atol=1.2e-7)
    np.testing.assert_allclose(found["rotary_sin"], sin[..., : R // 2], rtol=0, atol=1.2e-7)


def test_fused_form_holds_cosines_then_sines(fused: ExportResult) -> None:
    found, (cos, sin) = outputs_of(fused), expected()
    assert list(found) == ["rotary_cos_sin"]
    both = torch.cat((cos[..., : R // 2], sin[..., : R // 2]), dim=-1)
    np.testing.assert_allclose(found["rotary_cos_sin"], both, rtol=0, atol=1.2e-7)


def test_half_form_works_as_cache_of_onnx_operator(half: ExportResult) -> None:
    graph = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        rotate (float[b, h, l, d] x, int64[b, l] positions, float[m, r] cos, float[m, r] sin) => (float[b, h, l, d] y)
        { y = com.microsoft.RotaryEmbedding (x, positions, cos, sin) }"""
    )
    query = torch.randn(1, HEADS, LENGTH, R, generator=torch.Generator().manual_seed(0))
    found = outputs_of(half)
    given: dict[str, Any] = {"x": query.numpy(), "positions": np.arange(LENGTH)[None]}
    given |= {"cos": found["rotary_cos"][0], "sin": found["rotary_sin"][0]}
    (turned,) = onnxruntime.InferenceSession(graph.SerializeToString()).run(None, given)
    wanted, _ = apply_rotary_pos_emb(query, query, *expected())
    np.testing.assert_allclose(turned, wanted, rtol=0, atol=1e-6)


def test_rotary_form_is_in_manifest_and_verified(half: ExportResult, fused: ExportResult) -> None:
    for result, form, names in (
        (half, "half", ("rotary_cos", "rotary_sin")),
        (fused, "fused", ("rotary_cos_sin",) * 2),
    ):
        assert isinstance(result.manifest, Manifest)
        (rotary,) = result.manifest.rotary
        assert (rotary.form, rotary.cos, rotary.sin, rotary.width) == (form, *names, R)
        outputs = verify(result.folder).providers["CPUExecutionProvider"].outputs
        assert {*names, "embeddings"} == {*outputs}


def test_full_form_is_omitted_from_document() -> None:
    output = RotaryOutput(config=RotaryConfig(dim=8))
    assert "form" not in output.to_document()
    assert RotaryOutput.from_document(output.to_document()) == output


@pytest.mark.parametrize("form", ["half", "fused"])
def test_rotary_form_survives_document_round_trip(form: Literal["half", "fused"]) -> None:
    output = RotaryOutput(config=RotaryConfig(dim=8), form=form)
    assert RotaryOutput.from_document(output.to_document()) == output


def test_unknown_rotary_form_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^rotary\.form: got 'quarter', expected 'full', 'half', 'fused'"):
        RotaryOutput.from_document({"dim": 8, "form": "quarter"})


def test_rotary_layout_without_rotary_outputs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^--rotary-layout: got half, but the model has no rotary outputs: "):
        export("gpt2-small", "m", tmp_path, rotary_layout="half")
