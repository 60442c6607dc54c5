"""Token tables with several names, shared by a library, against the models of transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from tests.families.library_models import config_class
from tests.families.published_models import PUBLISHED
from tests.families.tiny_models import head_class
from tests.models.rejections import rejection

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
def test_t5_table_of_side_precedes_shared_table(tied: bool | None, tmp_path: Path) -> None:
    for tables in itertools.combinations(T5_TABLES, 2):
        save_t5(tmp_path, tables, tie_word_embeddings=tied)
        model = T5ForConditionalGeneration.from_pretrained(tmp_path)
        for side in SIDES:
            expected = model.get_parameter(f"{side}.embed_tokens.weight").detach()
            assert np.array_equal(read_frontend(tmp_path, side).tensors["tokens.weight"], expected), (tables, side)


def test_t5_encoder_alone_is_read_from_either_table(tmp_path: Path) -> None:
    for table in ("encoder.embed_tokens.weight", "shared.weight"):
        save_t5(tmp_path, (table,))
        tensors = load_file(tmp_path / "model.safetensors")
        kept = {key: value for key, value in tensors.items() if key == table or key.startswith("encoder.")}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        expected = T5EncoderModel.from_pretrained(tmp_path).get_parameter("encoder.embed_tokens.weight").detach()
        assert np.array_equal(read_frontend(tmp_path, "encoder").tensors["tokens.weight"], expected)


def save_with_head(name: str, folder: Path, **values: Any) -> Any:
    """Save a tiny model with one name of its shared table, chosen by `safetensors.torch.save_model`, and return it.

    `values` change `config.json`.
    """
    torch.manual_seed(0)
    model = head_class(name.partition("/")[0])(config_class(name)(**PUBLISHED[name].config | values))
    model.config.save_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gpt2", "lm_head.weight"),
        ("qwen2", "lm_head.weight"),
        ("bert", "cls.predictions.decoder.weight"),
        ("bart/encoder", "lm_head.weight"),
        ("bart/decoder", "lm_head.weight"),
        ("whisper/decoder", "proj_out.weight"),
    ],
)
def test_table_under_name_of_tied_head_is_read(name: str, head: str, tmp_path: Path) -> None:
    expected = save_with_head(name, tmp_path, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not torch.equal(tensor, expected)} | {head: expected.data}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = head_class(name.partition("/")[0]).from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, expected)
    assert np.array_equal(read_frontend(tmp_path, name.partition("/")[2] or None).tensors["tokens.weight"], expected)


def test_sharded_table_under_name_of_head_is_needed(tmp_path: Path) -> None:
    save_with_head("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    keys = ("lm_head.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight")
    index = {"weight_map": {key: f"{number}.safetensors" for number, key in enumerate(keys)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert files_needed(tmp_path) == ["0.safetensors", "1.safetensors"]


def test_head_alone_of_untied_model_is_rejected(tmp_path: Path) -> None:
    for name, stated in (("llama", {}), *((name, {"tie_word_embeddings": False}) for name in ("gpt2", "bart/encoder"))):
        model = save_with_head(name, tmp_path, **stated)
        save_file({"lm_head.weight": model.lm_head.weight.data}, tmp_path / "model.safetensors", {"format": "pt"})
        found = rejection(CheckpointError, read_frontend, tmp_path, name.partition("/")[2] or None)
        assert "do the files belong together" in found, name
