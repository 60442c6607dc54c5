"""Checkpoints in several files, as transformers writes them, and broken indices of their tensors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from preblock.export.errors import ExportError
from preblock.export.options import resolve
from preblock.export.source import load_source
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend_data import FrontEndData
from tests.families.library_models import model_class, save
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
    config = {"model_type": kind, "transformers_weights": "other.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "config.json: transformers_weights is 'other.safetensors', expec"
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
