"""Outputs for consumers of `inputs_embeds`. Oracle: the input of transformers' first block for given vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from transformers import AutoModel

from preblock.cli import app
from preblock.export.exporter import ExportResult, export
from preblock.service.artifacts.manifest import Manifest, TokenEmbeddings
from preblock.service.artifacts.names import GRAPH, TOKEN_GRAPHS
from tests.families.library_models import TransformersModel, save
from tests.families.tiny_models import save_whole

SCALED = (
    *("gemma", "gemma2", "gemma3_text", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "falcon_h1"),
    *("biogpt", "xglm", "bart/encoder", "marian/encoder", "pegasus/decoder"),
)


@pytest.mark.parametrize("name", SCALED)
def test_stated_output_matches_ids_in_transformers_first_block(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "checkpoint")
    exported = export(str(tmp_path / "checkpoint"), "m", tmp_path, side=name.partition("/")[2] or None)
    manifest = exported.manifest
    assert isinstance(manifest, Manifest)
    lookup = manifest.token_embeddings
    assert lookup is not None
    assert lookup.embedding_scale != 1
    newest = lookup.consumers[0]
    assert newest.engine == "transformers"
    assert newest.output in manifest.widths
    model = TransformersModel.load(name, tmp_path / "checkpoint")
    ids = np.random.default_rng(0).integers(3, 90, (2, 8))
    expected = model.first_block_input(ids)
    same: dict[str, bool] = {}
    for graph in filter(manifest.graphs.__contains__, TOKEN_GRAPHS):
        ((output, vectors),) = run_lookup(exported, graph, ids).items()
        entered = model.first_block_input(None, inputs_embeds=vectors)
        same[output] = bool(np.abs(entered - expected).max() <= 2e-6)
    stated = lookup.output if newest.output == "token_embeddings" else newest.output
    assert len(same) > 1
    assert same == {output: output == stated for output in same}


@pytest.mark.parametrize("name", ["gemma3n/text", "gemma4_text", "qwen4_exp_text"])
def test_stated_arguments_match_ids_in_transformers(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "checkpoint")
    source, side = str(tmp_path / "checkpoint"), name.partition("/")[2] or None
    exported = export(source, "m", tmp_path, side=side)
    alone = export(source, "tokens", tmp_path, side=side, tokens_only=True)
    lookup = lookup_of(exported)
    assert (lookup_of(alone).beside, lookup.prompt_outputs) == (lookup.beside, ())
    ((argument, output),) = lookup.beside.items()
    assert lookup.use == f"inputs_embeds of a model, with {argument}={output}"
    ids = np.random.default_rng(0).integers(3, 80, (2, 8))
    found = {"input_ids": ids} | run_lookup(exported, "embeddings.onnx", ids)
    found |= {} if output == "input_ids" else run_lookup(exported, "layer.tokens.onnx", ids)
    whole = TransformersModel.load(name, tmp_path / "checkpoint").whole
    vectors, given = torch.from_numpy(found["embeddings"]), {argument: torch.from_numpy(found[output])}
    with torch.inference_mode():
        expected = whole(input_ids=torch.from_numpy(ids)).last_hidden_state
        assert torch.equal(whole(inputs_embeds=vectors, **given).last_hidden_state, expected)
        if name.startswith("gemma3n"):
            assert (whole(inputs_embeds=vectors).last_hidden_state - expected).abs().max() > 0.1


def test_blocks_that_take_ids_exclude_inputs_embeds(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    save_whole("deepseek_v4", source)
    exported, alone = (export(str(source), name, tmp_path, tokens_only=name == "tokens") for name in ("m", "tokens"))
    assert lookup_of(exported).beside == lookup_of(alone).beside == {"input_ids": "input_ids"}
    assert lookup_of(exported).use.endswith("with input_ids: it fails for inputs_embeds alone")
    answer = CliRunner().invoke(app, ["inspect", "m", "--repository", str(tmp_path), "--for", "transformers"])
    assert "transformers takes no inputs_embeds of a deepseek_v4: its blocks need the token ids too" in answer.output
    whole = AutoModel.from_pretrained(source).eval()
    ids = torch.arange(3, 11)[None]
    vectors = torch.from_numpy(run_lookup(exported, GRAPH, ids.numpy())["embeddings"])
    with torch.inference_mode():
        expected = whole(input_ids=ids).last_hidden_state
        with pytest.raises(AttributeError):
            whole(inputs_embeds=vectors)
        whole.get_input_embeddings().weight.zero_()
        whole.get_input_embeddings().register_forward_hook(lambda *_: vectors)
        assert torch.equal(whole(input_ids=ids).last_hidden_state, expected)


def lookup_of(exported: ExportResult) -> TokenEmbeddings:
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.token_embeddings is not None
    return exported.manifest.token_embeddings


def run_lookup(exported: ExportResult, graph: str, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(exported.folder / graph)
    output = session.get_outputs()[0].name
    feeds = {node.name: {"input_ids": ids, "offset": np.zeros(1, np.int64)}[node.name] for node in session.get_inputs()}
    return {output: session.run([output], feeds)[0]}
