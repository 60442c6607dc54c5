"""Checkpoints in float16 and bfloat16, against transformers that loads them in float32 and in their own type."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from incipit.export.graph import export_graph
from incipit.export.parity import difference
from incipit.models.checkpoint import read_frontend
from tests.elsewhere.standard import check_standard
from tests.families.published import PUBLISHED, Model, save

# One family for each way of composing: norms, scales cast and not cast, tables derived and stored, projections.
FAMILIES = (
    "bert",
    "gpt2",
    "ctrl",
    "opt",
    "xglm",
    "bart/encoder",
    "marian/decoder",
    "m2m_100/encoder",
    "granite",
    "gemma",
)
IDS = np.random.default_rng(0).integers(3, 90, (2, 7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_narrow_checkpoint_equals_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path, dtype)
    kind = getattr(transformers, PUBLISHED[name].model)
    for arithmetic, loaded in (("float32", torch.float32), ("source", dtype)):
        frontend = read_frontend(tmp_path, name.partition("/")[2] or None, arithmetic).eval()  # type: ignore[arg-type]
        artifact = tmp_path / arithmetic
        artifact.mkdir()
        export_graph(frontend, artifact)
        check_standard(artifact)
        expected = Model(name, kind.from_pretrained(tmp_path, dtype=loaded).eval()).first_block_input(IDS)
        feeds = {
            "input_ids": IDS,
            "offset": np.zeros(1, np.int64),
            "token_type_ids": IDS * 0,
            "attention_mask": IDS * 0 + 1,
        }
        session = onnxruntime.InferenceSession(artifact / "model.onnx")
        found = session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})[0]
        allowed = 0.0 if frontend.config.exact or arithmetic == "source" else 8.0
        assert difference(found, expected)[1] <= allowed
