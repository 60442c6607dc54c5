"""Tiny models of Qwen4 with n-gram tables, and their rows by transformers' own module."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.families.tiny_models import small_config

END, LAYERS, WIDTH, VOCABULARY = 2, 2, 32, 99
SHARDS = "ple.ple_embedding.ngram_embedding.shard_"
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


def save_qwen4(folder: Path, **changed: Any) -> Path:
    """Save a tiny model with n-grams of up to 3 tokens in both layers."""
    config = small_config("qwen4_exp_text")
    for name, value in changed.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    transformers.Qwen4ExpForCausalLM(config).save_pretrained(folder)
    return folder


def random_ids(*shape: int, seed: int = 0) -> Int64:
    """Return ids with an end of sequence in every fifth place or so."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, shape)
    ids[random.random(shape) < 0.2] = END
    return ids


def run_transformers(folder: Path, chunks: list[Int64], layers: int = LAYERS) -> tuple[Int64, Float32]:
    """Return the row ids (B, L, N, H) and the embeddings (B, L, N, E) of ids fed in chunks."""
    model: Any = transformers.Qwen4ExpForCausalLM.from_pretrained(folder)
    cache = DynamicCache(config=model.config)
    rows, vectors = [], []
    for layer in range(layers):
        module: Any = model.model.layers[layer].ple.ple_embedding
        seen: list[torch.Tensor] = []
        module.ngram_embedding.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.inference_mode():
            vectors.append(torch.cat([module(torch.from_numpy(chunk), cache) for chunk in chunks], dim=1))
        rows.append(torch.cat(seen, dim=1))
    return torch.stack(rows, dim=2).numpy(), torch.stack(vectors, dim=2).float().numpy()


def quantize_tables(folder: Path, unit: str) -> dict[str, torch.Tensor]:
    """Store the n-gram tables of the checkpoint in `folder` in float8 with scales, and return the values by tensor.

    Args:
        folder: of the checkpoint.
        unit: "tensor", "row", or "block" of 128 x 128, with one scale.

    """
    file = folder / "model.safetensors"
    tensors, values = load_file(file), {}
    random = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if SHARDS in name]:
        rows, columns = tensors[name].shape
        shape = {"tensor": (), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[unit]
        scale = torch.rand(shape, generator=random) + 0.5
        stored = tensors[name].to(torch.float8_e4m3fn)
        ending = "_scale_inv" if unit == "block" else "_scale"
        tensors[name], tensors[name + ending] = stored, scale
        if unit == "block":
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        values[name] = stored.float() * scale
    save_file(tensors, file, {"format": "pt"})
    return values
