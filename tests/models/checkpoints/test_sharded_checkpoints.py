"""Checkpoints in several files, as transformers writes them, and broken indices of their tensors."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ViTConfig, ViTModel

from preblock.export.errors import ExportError
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.checkpoints.stem_reader import read_stem
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend import FrontEnd
from tests.families.library_models import model_class, save


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
    assert all(torch.equal(tensor, expected.state_dict()[key]) for key, tensor in found.state_dict().items())


@pytest.mark.parametrize("shards", [True, False])
def test_single_file_beside_index_is_read_as_in_transformers(sharded: Path, shards: bool) -> None:
    """transformers leaves the files of an earlier save in the folder."""
    model = model_class("bert").from_pretrained(sharded)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.add_(1)
    model.save_pretrained(sharded)
    for file in [] if shards else sharded.glob("model-*"):
        file.unlink()
    assert files_needed(sharded) == ["model.safetensors"]
    expected = model_class("bert").from_pretrained(sharded).embeddings.word_embeddings.weight
    assert torch.equal(read_frontend(sharded).tokens.weight, expected)


@pytest.mark.parametrize(
    ("name", "prefix", "table"),
    [
        ("gpt2", "transformer.", "wte"),
        ("bert", "bert.", "embeddings.word_embeddings"),
        ("llama", "model.", "embed_tokens"),
        ("bart/decoder", "model.", "decoder.embed_tokens"),
        ("gpt_neox", "gpt_neox.", "embed_in"),
    ],
)
def test_names_with_and_without_prefix_are_read_as_in_transformers(
    name: str, prefix: str, table: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {prefix + key: tensor + 1 for key, tensor in tensors.items()}
    save_file(tensors | named, tmp_path / "model.safetensors", {"format": "pt"})
    expected = model_class(name).from_pretrained(tmp_path).get_submodule(table).weight
    assert torch.equal(read_frontend(tmp_path, name.partition("/")[2] or None).tokens.weight, expected)


@pytest.mark.parametrize(
    ("name", "key", "copy", "own"),
    [
        ("bert", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma", "norm.weight"),
        ("bert", "embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta", "norm.bias"),
        (
            "bert",
            "embeddings.position_embeddings.weight",
            "bert.embeddings.position_embeddings.weight",
            "positions.weight",
        ),
        ("gpt2", "wpe.weight", "transformer.wpe.weight", "positions.weight"),
        (
            "roberta",
            "embeddings.position_embeddings.weight",
            "roberta.embeddings.position_embeddings.weight",
            "positions.weight",
        ),
        ("mamba", "embeddings.weight", "backbone.embedding.weight", "tokens.weight"),
    ],
)
def test_tensor_under_two_names_is_read_as_in_transformers(
    name: str, key: str, copy: str, own: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {copy: tensors[key] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = model_class(name).from_pretrained(tmp_path).get_parameter(key)
    assert torch.equal(read_frontend(tmp_path).get_parameter(own), expected)


def test_names_of_images_with_and_without_prefix_are_read_as_in_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    made: Any = ViTConfig
    ViTModel(made(**sizes, intermediate_size=8)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"vit.{key}": tensor + 1 for key, tensor in tensors.items()}
    save_file(tensors | named, tmp_path / "model.safetensors", {"format": "pt"})
    expected = ViTModel.from_pretrained(tmp_path).embeddings.position_embeddings[0]
    assert torch.equal(read_stem(tmp_path).state_dict()["positions"].reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", ["bert", "vit", "arcee"])
def test_other_file_named_by_config_is_rejected(kind: str, tmp_path: Path) -> None:
    """Of a row, of images, and of a discovered type; `config.json` beside a description is not read."""
    config = {"model_type": kind, "transformers_weights": "other.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=r"^config\.json: transformers_weights is 'other\.safetensors', expec"):
        load_source(str(tmp_path))
    GPT2Embeddings(7, 4, 6).save_frontend(tmp_path)
    assert isinstance(load_source(str(tmp_path)).frontend, FrontEnd)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "inner/../../outside.safetensors", "a\0b"])
def test_index_path_outside_folder_is_rejected(sharded: Path, place: str) -> None:
    shutil.copyfile(next(sharded.glob("model-*.safetensors")), sharded.parent / "outside.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["embeddings.LayerNorm.bias"] = place
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    message = rf"index\.json: got {re.escape(repr(place))}, expected the name of a file in its folder"
    with pytest.raises(CheckpointError, match=message):
        read_frontend(sharded)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": [1]}', '{"weight_map": {"x": 1}}'])
def test_broken_index_is_rejected(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
        read_frontend(sharded)


def test_missing_shard_is_rejected(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["embeddings.word_embeddings.weight"]
    (sharded / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        read_frontend(sharded)
