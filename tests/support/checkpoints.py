"""Checkpoints of GPT-2 with given tables, written without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file


def write_gpt2(folder: Path, tokens: NDArray[Any], positions: NDArray[Any]) -> Path:
    """Write a front-end with tables (V, D) and (M, D) into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": len(tokens), "n_embd": tokens.shape[1], "n_positions": len(positions)}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    save_file({"wte.weight": tokens, "wpe.weight": positions}, folder / "model.safetensors")
    return folder


def random_gpt2(folder: Path, vocabulary: int = 7) -> Path:
    """Write the tables of a tiny GPT-2 (D 4, M 6), others in every call, and return the folder."""
    draw = np.random.default_rng()
    tokens, positions = (draw.standard_normal((size, 4), np.float32) for size in (vocabulary, 6))
    return write_gpt2(folder, tokens, positions)
