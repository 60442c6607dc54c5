"""A saved front-end, read back: the same configuration and the same weights, bit for bit."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from preblock.models import (
    BertEmbeddings,
    FrontEnd,
    GPT2Embeddings,
    GridEmbedding,
    HierarchicalEmbedding,
    HybridEmbedding,
    TransformerEmbedding,
)
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.modules.bias import AlibiConfig
from tests.models.front_ends import DESCRIBED
from tests.models.rejections import rejection

V, D, M = 9, 4, 6
FRONT_ENDS = {
    "transformer": TransformerEmbedding(V, D, M),
    "transformer learned": TransformerEmbedding(V, D, M, "learned", padding_idx=2),
    "bert": BertEmbeddings(V, D, M),
    "bert without segments": BertEmbeddings(V, D, M, segments=0, padding_idx=None),
    "gpt2": GPT2Embeddings(V, D, M, dropout=0.0),
    "hybrid": HybridEmbedding(V, D, M, 20),
    "grid": GridEmbedding(V, D, (2, 3)),
    "grid factorised": GridEmbedding(V, D, (2, 3), "factorised"),
    "grid sinusoidal": GridEmbedding(V, D, (2, 3), "sinusoidal"),
    "hierarchical": HierarchicalEmbedding(V, D, {"sentence": 3, "word": 5}),
    **{name: FrontEnd(config) for name, config in DESCRIBED.items()},
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_saved_front_end_is_read_back(name: str, tmp_path: Path) -> None:
    frontend = FRONT_ENDS[name]
    frontend.save_frontend(tmp_path / "new" / "folder")
    found = FrontEnd.from_data(read_description(tmp_path / "new" / "folder"))
    assert found.config.to_document() == frontend.config.to_document()
    assert files_described(tmp_path / "new" / "folder") == ["model.safetensors"]
    expected = frontend.state_dict()
    assert list(found.state_dict()) == list(expected)
    for key, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


def test_narrow_weights_keep_their_values(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        frontend = BertEmbeddings(V, D, M).to(dtype)
        frontend.save_frontend(tmp_path)
        for key, tensor in read_description(tmp_path).tensors.items():
            assert np.array_equal(tensor, frontend.state_dict()[key].float())


def test_save_into_source_folder_replaces_the_file(tmp_path: Path) -> None:
    GPT2Embeddings(V, D, M).save_frontend(tmp_path)
    read = FrontEnd.from_data(read_description(tmp_path))
    before = read.tokens.weight.detach().clone()
    with torch.no_grad():
        read.get_parameter("positions.weight").zero_()
    read.save_frontend(tmp_path)
    again = FrontEnd.from_data(read_description(tmp_path))
    assert torch.equal(again.tokens.weight, before)
    assert not again.get_parameter("positions.weight").any()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["frontend.toml", "model.safetensors"]


def test_unsupported_front_end_is_not_saved(tmp_path: Path) -> None:
    with_bias = FrontEnd(replace(GPT2Embeddings(V, D, M).config, bias=AlibiConfig(heads=2)))
    for frontend, message in (
        (GPT2Embeddings(V, D, M).double(), "tokens.weight: got float64, expected float32"),
        (GPT2Embeddings(V, D, M).to("meta"), "tokens.weight: got a tensor on the device meta, expected one with"),
        (with_bias, "bias: got 'alibi', expected none: frontend.toml cannot describe it"),
    ):
        assert message in rejection(ValueError, frontend.save_frontend, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_tied_and_overlapping_tables_are_saved_separately(tmp_path: Path) -> None:
    values, ids = torch.arange((V + 2) * D, dtype=torch.float32).reshape(-1, D), torch.tensor([[3, 1, 2]])
    for shift in (0, 2):
        frontend = GPT2Embeddings(V, D, V)
        frontend.tokens.weight = torch.nn.Parameter(values[:V])
        frontend.positions.weight = torch.nn.Parameter(values[shift:]) if shift else frontend.tokens.weight
        frontend.save_frontend(tmp_path)
        assert torch.equal(FrontEnd.from_data(read_description(tmp_path)).eval()(ids), frontend.eval()(ids))


def test_save_over_another_checkpoint_is_rejected(tmp_path: Path) -> None:
    """The file of a whole model holds more than its front-end."""
    frontend, file = GPT2Embeddings(V, D, M), tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    message = "holds the model.safetensors.index.json of another checkpoint; choose another folder"
    assert message in rejection(ValueError, frontend.save_frontend, tmp_path)
    index.unlink()
    file.write_bytes(b"damaged")
    found = rejection(ValueError, frontend.save_frontend, tmp_path)
    assert re.search(r"model\.safetensors: .*; choose another folder", found)
    file.unlink()
    for described in (False, True):
        if described:
            frontend.save_frontend(tmp_path)
        save_file({**frontend.state_dict(), "h.0.attn.weight": torch.ones(2)}, file)
        before = file.read_bytes()
        found = rejection(ValueError, frontend.save_frontend, tmp_path)
        assert re.search(r"model\.safetensors: holds .*, which frontend.toml does not name; choose", found)
        assert file.read_bytes() == before
        file.unlink()
