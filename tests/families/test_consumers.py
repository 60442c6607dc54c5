"""Outputs for consumers of `inputs_embeds`. Oracle: the input of transformers' first block for given vectors."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from preblock.export.exporter import export
from preblock.models.checkpoints.consumers import CONSUMERS, READ_VERSION
from preblock.service.artifacts.manifest import TOKEN_GRAPHS, Manifest
from tests.families.library_models import TransformersModel, save

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
        session = onnxruntime.InferenceSession(exported.folder / graph)
        feeds = {"input_ids": ids, "offset": np.zeros(1, np.int64)}
        given = {node.name: feeds[node.name] for node in session.get_inputs()}
        output = session.get_outputs()[0].name
        (vectors,) = session.run([output], given)
        entered = model.first_block_input(None, inputs_embeds=vectors)
        same[output] = bool(np.abs(entered - expected).max() <= 2e-6)
    stated = lookup.output if newest.output == "token_embeddings" else newest.output
    assert len(same) > 1
    assert same == {output: output == stated for output in same}


def test_consumer_rows_state_source_and_library_version() -> None:
    for rows in CONSUMERS.values():
        assert (rows[0].engine, READ_VERSION in rows[0].source) == ("transformers", True)
        assert all(row.source and row.scale in ("applied", "none") for row in rows)
