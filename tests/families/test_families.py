"""Every row of the family table against transformers itself, on tiny random checkpoints."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from preblock.export.graph import export_graph
from preblock.export.parity import ROTARY_ULP
from preblock.models.checkpoints.families import FAMILIES
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.rotary_families import ROTARY
from tests.clients.client_matrix import check_standard
from tests.families.library_models import NO_LOOKUP, STREAMS, TransformersModel, save
from tests.families.parity import check_rows_of_one, compare, compare_rotary
from tests.families.published_models import PUBLISHED
from tests.families.stems import ROWS
from tests.families.table import DOCUMENT, versions

# The first block of one is no module; those of others also take inputs of the ids, or several streams.
NO_BLOCK = {"xlm", "gemma3n_text", "gemma3n/text", "gemma4_text", "gemma4/text", "gemma4_unified/text", *STREAMS}


def test_family_table_rows_have_oracles() -> None:
    assert sorted(PUBLISHED) == sorted(FAMILIES)


def test_family_document_matches_table_and_versions() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in document.splitlines() if line.startswith("| `")] == [
        *FAMILIES,
        *ROWS.values(),
    ]
    assert versions() in document


@pytest.mark.parametrize("name", PUBLISHED)
def test_family_matches_transformers(name: str, tmp_path: Path) -> None:
    checkpoint, artifact = tmp_path / "checkpoint", tmp_path / "artifact"
    save(name, checkpoint)
    artifact.mkdir()
    frontend = read_frontend(checkpoint, name.partition("/")[2] or None).eval()
    export_graph(frontend, artifact)
    check_standard(artifact, frontend.config.indices)
    if "project" not in {step.kind for step in frontend.config.steps} and frontend.config.per_layer is None:
        check_rows_of_one(artifact, frontend.config)
    model = TransformersModel.load(name, checkpoint)
    allowed = 0.0 if frontend.config.exact else 8.0
    for difference in compare(model, artifact, frontend.config):
        assert difference.max_ulp <= allowed, difference

    assert bool(frontend.config.rotary) == bool(PUBLISHED[name].rotary) == (name in ROTARY and name != "esm")
    if frontend.config.rotary:
        for difference in compare_rotary(model, artifact):
            assert difference.max_ulp <= ROTARY_ULP, difference

    tolerance = 0.0 if frontend.config.exact else 2e-5  # two blocks carry the last bits of the norm further
    legal = np.setdiff1d(np.arange(3, 90), frontend.config.refused_ids)
    ids = np.random.default_rng(2).choice(legal, (2, 8))
    expected = model.hidden_states(input_ids=ids)
    feeds = {"input_ids": ids, "offset": np.zeros(1, np.int64)}
    feeds |= dict.fromkeys(frontend.config.indices, ids * 0)
    feeds |= {"attention_mask": ids * 0 + 1} if frontend.config.needs_mask else {}
    embeddings = onnxruntime.InferenceSession(artifact / "model.onnx").run(None, feeds)[0]
    if name not in NO_BLOCK:
        np.testing.assert_allclose(model.hidden_states_of(embeddings, ids), expected, rtol=0, atol=tolerance)

    if name not in NO_LOOKUP:
        graph = "token.onnx" if (artifact / "token.onnx").exists() else "model.onnx"
        session = onnxruntime.InferenceSession(artifact / graph)
        tokens = session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})[0]
        np.testing.assert_allclose(model.hidden_states(inputs_embeds=tokens), expected, rtol=0, atol=tolerance)
