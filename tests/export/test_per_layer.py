"""Per-layer inputs of Gemma 3n and Gemma 4. Oracle: transformers' own functions on the same tiny model."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import preblock
from preblock.client.errors import RequestError
from preblock.export.errors import ExportError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.output_uses import describe_uses
from preblock.service.runtime.session import Session
from tests.cli.command_line import failing, run
from tests.families.library_models import TransformersModel, save
from tests.families.tiny_models import small_config
from tests.support.servers import serve
from tests.support.shared import Shared

VOCABULARY, LAYERS, WIDTH = 99, 2, 16
NAMES = {"per_layer_token_inputs": "layer.tokens.onnx", "per_layer_inputs": "layer.inputs.onnx"}
ALLOWED = 8 + 4 * 32**0.5
"""For sums of 32 products."""
IDS = np.array([[3, 98, 0, 41], [7, 7, 12, 50]])


def small_gemma(folder: Path, **changed: int) -> str:
    config = small_config("gemma4_text")
    config.hidden_size_per_layer_input = WIDTH
    config.vocab_size_per_layer_input = VOCABULARY
    config.pad_token_id = 0
    for name, value in changed.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.Gemma4TextModel(config)
    if config.hidden_size_per_layer_input:
        with torch.no_grad():
            model.per_layer_projection_norm.weight.normal_(1, 0.3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def layered_checkpoint(shared: Shared) -> str:
    return shared.build("layered checkpoint", small_gemma)


@pytest.fixture(scope="module")
def exported(layered_checkpoint: str, shared: Shared) -> ExportResult:
    return shared.build("layered", lambda root: export(layered_checkpoint, "m", root))


def inputs_of(text: Any, ids: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    """Return the per-layer inputs of a model of transformers."""
    given = torch.from_numpy(ids)
    with torch.inference_mode():
        tokens = text.get_per_layer_inputs(given)
        combined = text.project_per_layer_inputs(text.embed_tokens(given), tokens)
    return {"per_layer_token_inputs": tokens.numpy(), "per_layer_inputs": combined.flatten(-2).numpy()}


def ulp(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the largest difference in units in the last place of the largest value of a token."""
    rows, others = found.reshape(IDS.size, -1), wanted.reshape(IDS.size, -1)
    return float((np.abs(rows - others).max(1) / np.spacing(np.abs(others).max(1))).max())


def test_per_layer_outputs_are_in_manifest_and_parity(exported: ExportResult) -> None:
    assert isinstance(exported.manifest, Manifest)
    assert not exported.manifest.exact_rows  # a product of matrices depends on the shape of the call
    assert exported.manifest.shapes["per_layer_token_inputs"] == (LAYERS, WIDTH)
    assert exported.manifest.widths["per_layer_token_inputs"] == LAYERS * WIDTH
    outputs = verify(exported.folder).providers["CPUExecutionProvider"].outputs
    assert outputs["per_layer_token_inputs"].allowed_ulp == 0
    assert outputs["per_layer_inputs"].max_ulp <= outputs["per_layer_inputs"].allowed_ulp == ALLOWED


def test_server_returns_per_layer_outputs(layered_checkpoint: str, exported: ExportResult) -> None:
    expected = inputs_of(transformers.Gemma4TextModel.from_pretrained(layered_checkpoint), IDS)
    with serve(exported.folder.parents[1]) as server, preblock.connect(server.address) as client:
        for name, wanted in expected.items():
            answer = client.embed(IDS, model="m", output=name)
            assert answer.vectors.shape == wanted.shape
            assert ulp(answer.vectors, wanted) <= ALLOWED
            with client.decode("m", output=name, rows=2) as stream:
                step = stream.step(IDS)
                assert step.shape == (2, 4, LAYERS * WIDTH)
                assert ulp(step, wanted) <= ALLOWED
        assert answer.use_as == "inputs of all layers"
        with pytest.raises(RequestError, match="needs per_layer_inputs=per_layer_token_inputs too, and prompt_embeds"):
            client.prompt_embeds(IDS, model="m")
    at = ("--repository", exported.folder.parents[1])
    beside = "inputs_embeds of a model, with per_layer_inputs=per_layer_token_inputs"
    assert f"also {beside}; with the scale" in run("inspect", "m", *at).stdout
    assert "token_embeddings, with per_layer_inputs" in run("inspect", "m", "--for", "transformers", *at).stdout
    assert failing("inspect", "m", "--for", "vllm", *at, code=1).startswith("vllm takes one tensor, but a gemma4_text")


@pytest.mark.parametrize(
    ("name", "refused", "streams"),
    [("gemma4_text", 0, 1), ("gemma3n_text", 0, 4), ("gemma3n/text", 8, 4), ("gemma4/text", 2, 1)],
)
def test_per_layer_graphs_match_transformers(name: str, refused: int, streams: int, tmp_path: Path) -> None:
    save(name, tmp_path / "checkpoint")
    result = export(str(tmp_path / "checkpoint"), "m", tmp_path, side=name.partition("/")[2] or None)
    manifest = result.manifest
    assert isinstance(manifest, Manifest)
    assert len(manifest.refused_ids) == refused
    assert manifest.front_end is not None
    assert manifest.front_end.get("streams", 1) == streams
    assert ("streams that enter block 0" in describe_uses(manifest)["embeddings"]) == (streams > 1)
    whole = TransformersModel.load(name, tmp_path / "checkpoint").whole
    text = whole.language_model if "/" in name else whole
    ids = np.array([[3, 89, 90, 40], [7, 7, 12, 0]])  # Gemma 3n's table has 90 rows
    expected = inputs_of(text, ids)
    for output, graph in NAMES.items():
        found = Session(result.folder, graph=graph).run({"input_ids": ids})[output]
        assert ulp(found, expected[output]) <= (0 if output == "per_layer_token_inputs" else ALLOWED)
    outputs = verify(result.folder).providers["CPUExecutionProvider"].outputs
    assert outputs["per_layer_token_inputs"].max_abs == 0


def test_damaged_part_is_rejected(tmp_path: Path) -> None:
    save("gemma3n/text", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"vision_config": 3}))
    with pytest.raises(CheckpointError, match="vision_config: got 3, expected an object"):
        read_frontend(tmp_path, "text")


def test_export_without_per_layer_inputs_has_no_such_outputs(tmp_path: Path) -> None:
    result = export(small_gemma(tmp_path / "plain", hidden_size_per_layer_input=0), "m", tmp_path)
    assert isinstance(result.manifest, Manifest)
    assert not result.manifest.shapes.keys() & NAMES.keys()


def test_per_layer_table_with_fewer_rows_is_rejected(layered_checkpoint: str, tmp_path: Path) -> None:
    folder = shutil.copytree(layered_checkpoint, tmp_path / "copy")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"vocab_size_per_layer_input": 99', '"vocab_size_per_layer_input": 98')
    )
    with pytest.raises(ExportError, match="vocab_size_per_layer_input: got 98, expected 99"):
        export(str(folder), "m", tmp_path)
