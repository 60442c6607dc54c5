"""Rotary outputs in other forms and in float16. Oracles: transformers, and onnxruntime's operator RotaryEmbedding."""

import copy
from dataclasses import replace
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

import preblock
from preblock.export.errors import ExportError, ParityError
from preblock.export.exporter import ExportResult, export
from preblock.export.parity import prove_rotary
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS_GRAPH, GRAPH
from preblock.service.runtime.session import Session
from tests.support.servers import serve
from tests.support.shared import Shared

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
def rotary_checkpoint(shared: Shared) -> str:
    return str(shared.make("forms checkpoint", transformers.LlamaModel(CONFIG).save_pretrained))


@pytest.fixture(scope="module")
def half(rotary_checkpoint: str, shared: Shared) -> ExportResult:
    return shared.build("half", lambda root: export(rotary_checkpoint, "m", root, rotary_layout="half"))


@pytest.fixture(scope="module")
def fused(rotary_checkpoint: str, shared: Shared) -> ExportResult:
    return shared.build("fused", lambda root: export(rotary_checkpoint, "m", root, rotary_layout="fused"))


@pytest.fixture(scope="module", params=["full", "half", "fused"])
def narrow(rotary_checkpoint: str, shared: Shared, request: pytest.FixtureRequest) -> ExportResult:
    """An artifact with float16 outputs in each form."""
    options: dict[str, Any] = {"rotary_layout": request.param, "rotary_dtype": "float16"}
    return shared.build(f"narrow {request.param}", lambda root: export(rotary_checkpoint, "m", root, **options))


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
    with pytest.raises(ValueError, match=r"^rotary\.form: got 'quarter', expected full, half, fused"):
        RotaryOutput.from_document({"dim": 8, "form": "quarter"})


def test_rotary_layout_without_rotary_outputs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^--rotary-layout: got half, but the model has no rotary outputs: "):
        export("gpt2-small", "m", tmp_path, rotary_layout="half")


def run_graph(folder: Path, offset: int, length: int) -> dict[str, NDArray[Any]]:
    """Return all rotary outputs of `model.onnx`, without any code of the service."""
    session = onnxruntime.InferenceSession(folder / GRAPH)
    names = [node.name for node in session.get_outputs() if node.name != "embeddings"]
    feeds = {"input_ids": np.zeros((1, length), np.int64), "offset": np.array([offset])}
    return dict(zip(names, session.run(names, feeds), strict=True))


def config_of(result: ExportResult) -> FrontEndConfig:
    assert isinstance(result.manifest, Manifest)
    assert result.manifest.front_end is not None
    return FrontEndConfig.from_document(result.manifest.front_end)


def test_float16_outputs_match_transformers_in_float16(narrow: ExportResult) -> None:
    """The library casts its cosines to the type of the hidden states."""
    positions = torch.arange(4000)[None]
    cos, sin = LlamaRotaryEmbedding(CONFIG)(torch.zeros(1, dtype=torch.float16), positions)
    form = config_of(narrow).rotary[0].form
    if form != "full":
        cos, sin = cos[..., : R // 2], sin[..., : R // 2]
    wanted = [torch.cat((cos, sin), dim=-1)] if form == "fused" else [cos, sin]
    found = run_graph(narrow.folder, 0, 4000).values()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == np.float16
        # The float32 cosines of two libraries differ in the last bit, and then round to different neighbours.
        different = one != other.numpy()
        assert different.mean() < 1e-3
        np.testing.assert_allclose(one[different], other.numpy()[different], rtol=2.0**-10, atol=2.0**-24)


def test_float16_outputs_are_float32_outputs_rounded_once(
    rotary_checkpoint: str, narrow: ExportResult, tmp_path: Path
) -> None:
    wide = export(rotary_checkpoint, "m", tmp_path, rotary_layout=config_of(narrow).rotary[0].form)
    for offset in (0, 1, OFFSET, 2**20, 2**31 - 1000):
        found, wanted = run_graph(narrow.folder, offset, 1000), run_graph(wide.folder, offset, 1000)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert np.array_equal(found[name], values.astype(np.float16))


def test_float16_is_in_manifest_and_verified(narrow: ExportResult) -> None:
    assert isinstance(narrow.manifest, Manifest)
    (rotary,) = narrow.manifest.rotary
    outputs = {spec.name: spec.dtype for spec in narrow.manifest.graphs[GRAPH].outputs}
    assert rotary.dtype == outputs[rotary.cos] == outputs[rotary.sin] == "float16"
    assert outputs["embeddings"] == "float32"
    verify(narrow.folder)


def test_float16_proof_detects_slightly_different_frequencies(narrow: ExportResult) -> None:
    config = config_of(narrow)
    (output,) = config.rotary
    other = replace(config, rotary=(replace(output, config=replace(output.config, theta=1.001e4)),))
    with pytest.raises(ParityError, match=r"rotary_cos(_sin)? of the graph differs"):
        prove_rotary(
            TorchReference(FrontEnd(other)), Session(narrow.folder), Session(narrow.folder, graph=EMBEDDINGS_GRAPH)
        )


def test_server_widens_float16_outputs(narrow: ExportResult) -> None:
    ids = [[0] * LENGTH, [1] * LENGTH]
    with serve(narrow.folder.parent.parent) as server, preblock.connect(server.address) as client:
        for name, values in run_graph(narrow.folder, OFFSET, LENGTH).items():
            for dtype in ("float32", "float16"):
                found = client.embed(ids, model="m", offset=OFFSET, output=name, dtype=dtype).vectors
                assert found.dtype == dtype
                assert np.array_equal(found, np.concatenate([values, values]))


def test_float16_survives_document_round_trip() -> None:
    output = RotaryOutput(config=RotaryConfig(dim=8), dtype="float16")
    assert RotaryOutput.from_document(output.to_document()) == output
    assert "dtype" not in RotaryOutput(config=RotaryConfig(dim=8)).to_document()


def test_unknown_rotary_dtype_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^rotary\.dtype: got 'bfloat16', expected float32, float16"):
        RotaryOutput.from_document({"dim": 8, "dtype": "bfloat16"})


def test_rotary_dtype_without_rotary_outputs_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"^--rotary-dtype: got float16, but the model has no rotary outputs: "):
        export("gpt2-small", "m", tmp_path, rotary_dtype="float16")


def test_factor_beyond_float16_is_rejected(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1e5}
    config = copy.deepcopy(CONFIG)
    config.rope_parameters = {"rope_theta": 1e4, **yarn}
    transformers.LlamaModel(config).save_pretrained(tmp_path / "source")
    message = r"^--rotary-dtype: rotary\.dtype: got 'float16', expected 'float32' for values above 65504"
    with pytest.raises(ExportError, match=message):
        export(str(tmp_path / "source"), "m", tmp_path, rotary_dtype="float16")
