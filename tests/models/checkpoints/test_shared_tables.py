"""Token tables that a library shares among several names, against the models of transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

from preblock.models.checkpoints.reader import read_frontend

SIDES = ("encoder", "decoder")
T5_TABLES = (*(f"{side}.embed_tokens.weight" for side in SIDES), "lm_head.weight", "shared.weight")


def save_t5(folder: Path, tables: tuple[str, ...], **values: Any) -> None:
    """Save a T5 with a different table under each of the names `tables`; `values` of `config.json` may be None."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["shared.weight"]
    save_file(tensors | {name: torch.randn(30, 8) for name in tables}, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in document.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize("side", SIDES)
def test_t5_table_of_side_precedes_shared_table(side: str, tied: bool | None, tmp_path: Path) -> None:
    for tables in itertools.combinations(T5_TABLES, 2):
        save_t5(tmp_path, tables, tie_word_embeddings=tied)
        model = T5ForConditionalGeneration.from_pretrained(tmp_path)
        expected = model.get_parameter(f"{side}.embed_tokens.weight")
        assert torch.equal(read_frontend(tmp_path, side).tokens.weight, expected), tables


@pytest.mark.parametrize("table", ["encoder.embed_tokens.weight", "shared.weight"])
def test_t5_encoder_alone_is_read_from_either_table(table: str, tmp_path: Path) -> None:
    save_t5(tmp_path, (table,))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if key == table or key.startswith("encoder.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    expected = T5EncoderModel.from_pretrained(tmp_path).get_parameter("encoder.embed_tokens.weight")
    assert torch.equal(read_frontend(tmp_path, "encoder").tokens.weight, expected)
