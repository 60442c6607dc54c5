"""Checkpoints in several files, and tables with several names, against the models of transformers."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import T5Config, T5ForConditionalGeneration

from preblock.export.errors import ExportError
from preblock.export.options import resolve
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend_data import FrontEndData
from tests.families.library_models import config_class, model_class, save
from tests.families.published_models import PUBLISHED
from tests.families.tiny_models import head_class
from tests.models.rejections import rejection


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The folder of a tiny BERT in several files."""
    save("bert", tmp_path / "whole")
    model_class("bert").from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "bert", max_shard_size="1KB")
    return tmp_path / "bert"


@pytest.mark.parametrize("name", ["bert", "gpt2", "ctrl", "clip/text", "t5/encoder"])
def test_files_needed_suffice_to_read_front_end(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "whole")
    kind, side = model_class(name), name.partition("/")[2] or None
    kind.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "shards", max_shard_size="1KB")
    needed, removed = files_needed(tmp_path / "shards", side), 0
    for file in set((tmp_path / "shards").glob("model-*.safetensors")):
        if file.name not in needed:
            file.unlink()
            removed += 1
    assert removed > 3
    found, expected = read_frontend(tmp_path / "shards", side), read_frontend(tmp_path / "whole", side)
    assert found.config == expected.config
    assert all(np.array_equal(tensor, expected.tensors[key]) for key, tensor in found.tensors.items())


def test_single_file_beside_index_is_read_as_in_transformers(sharded: Path) -> None:
    """transformers leaves the files of an earlier save in the folder."""
    model = model_class("bert").from_pretrained(sharded)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.add_(1)
    model.save_pretrained(sharded)
    expected = model_class("bert").from_pretrained(sharded).embeddings.word_embeddings.weight.detach()
    assert files_needed(sharded) == ["model.safetensors"]
    warning = load_source(resolve(str(sharded))).warning
    assert "model.safetensors and model.safetensors.index.json both name the weights" in warning
    assert np.array_equal(read_frontend(sharded).tensors["tokens.weight"], expected)
    for file in sharded.glob("model-*"):
        file.unlink()
    assert np.array_equal(read_frontend(sharded).tensors["tokens.weight"], expected)


@pytest.mark.parametrize(
    ("name", "key", "copy", "own"),
    [
        ("bert", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma", "norm.weight"),
        ("roberta", "embeddings.word_embeddings.weight", "roberta.embeddings.word_embeddings.weight", "tokens.weight"),
        ("gpt2", "wpe.weight", "transformer.wpe.weight", "positions.weight"),
        ("mamba", "embeddings.weight", "backbone.embedding.weight", "tokens.weight"),
        ("bart/decoder", "shared.weight", "model.shared.weight", "tokens.weight"),
    ],
)
def test_tensor_under_two_names_is_read_as_in_transformers(
    name: str, key: str, copy: str, own: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {copy: tensors[key] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = model_class(name).from_pretrained(tmp_path).get_parameter(key).detach()
    assert np.array_equal(read_frontend(tmp_path, name.partition("/")[2] or None).tensors[own], expected)


@pytest.mark.parametrize("kind", ["bert", "vit", "arcee"])
def test_other_file_named_by_config_is_rejected(kind: str, tmp_path: Path) -> None:
    """Of a row, of images, and of a discovered type; `config.json` beside a description is not read."""
    for key, value in (("transformers_weights", "other.safetensors"), ("configuration_files", ["config.5.0.0.json"])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, key: value}))
        message = f"config.json: {key} is {value!r}, expected none: rename"
        assert message in rejection(ExportError, load_source, resolve(str(tmp_path)))
    GPT2Embeddings(7, 4, 6).save_frontend(tmp_path)
    assert isinstance(load_source(resolve(str(tmp_path))).frontend, FrontEndData)


def test_broken_index_or_missing_shard_is_rejected(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shutil.copyfile(next(sharded.glob("model-*.safetensors")), sharded.parent / "outside.safetensors")
    for place in ("../outside.safetensors", "/etc/passwd", "inner/../../outside.safetensors", "a\0b"):
        weight_map = index["weight_map"] | {"embeddings.LayerNorm.bias": place}
        file.write_text(json.dumps(index | {"weight_map": weight_map}))
        message = f"index.json: got {place!r}, expected the name of a file in its folder"
        assert message in rejection(CheckpointError, read_frontend, sharded)
    for text in ("{", "{}", '{"weight_map": [1]}', '{"weight_map": {"x": 1}}'):
        file.write_text(text)
        assert "model.safetensors.index.json: " in rejection(CheckpointError, read_frontend, sharded), text
    file.write_text(json.dumps(index))
    shard = index["weight_map"]["embeddings.word_embeddings.weight"]
    (sharded / shard).unlink()
    assert shard in rejection(CheckpointError, read_frontend, sharded)


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
