"""Checkpoints in float16 and bfloat16, against transformers in float32 and in the stored type."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from preblock.export.outputs import write_graphs
from preblock.export.parity import difference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.frontend import FrontEnd
from tests.clients.client_matrix import check_standard
from tests.families.library_models import TransformersModel, model_class, save

# One family for each way of composing: norms, scales cast and not cast, tables derived and stored, projections.
# The target type is one number in the nodes of a rounding graph: two compositions cover the other type.
CASES = [
    *((name, torch.bfloat16) for name in ("bert", "gpt2", "ctrl", "opt", "xglm", "bart/encoder", "marian/decoder")),
    *((name, torch.bfloat16) for name in ("m2m_100/encoder", "granite", "gemma")),
    *((name, torch.float16) for name in ("bert", "gemma")),
]
IDS = np.random.default_rng(0).integers(3, 90, (2, 7))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_float16_and_bfloat16_checkpoints_match_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path, dtype)
    kind = model_class(name)
    for arithmetic, loaded in (("float32", torch.float32), ("source", dtype)):
        frontend = FrontEnd.from_data(read_frontend(tmp_path, name.partition("/")[2] or None, arithmetic)).eval()  # type: ignore[arg-type]
        expected = TransformersModel(name, kind.from_pretrained(tmp_path, dtype=loaded).eval()).first_block_input(IDS)
        allowed = 0.0 if frontend.config.exact or arithmetic == "source" else 8.0
        with torch.inference_mode():
            found = frontend(torch.from_numpy(IDS)).float().numpy()
        assert difference(found, expected)[1] <= allowed
        if arithmetic == "source":  # a rounding graph has other nodes
            graph = by_onnxruntime(frontend, tmp_path / arithmetic)
            assert difference(graph, expected)[1] <= allowed


def by_onnxruntime(frontend: FrontEnd, folder: Path) -> NDArray[np.float32]:
    """Export a front-end, hold it against the standard, and run it."""
    folder.mkdir()
    write_graphs(frontend.data(), folder)
    check_standard(folder)
    feeds = {
        "input_ids": IDS,
        "offset": np.zeros(1, np.int64),
        "token_type_ids": IDS * 0,
        "attention_mask": IDS * 0 + 1,
    }
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    vectors: NDArray[np.float32] = session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})[0]
    return vectors
