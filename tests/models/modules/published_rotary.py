"""Rotary configurations of every scaling."""

from typing import Any

import torch
from torch import Tensor

from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.modules.rotary_config import RotaryConfig
from tests.models.checkpoints.rotary_models import ROTARY

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
FAR = 131072
"""Positions up to one less are compared."""


def read(values: dict[str, Any], length: int | None = None, family: str = "llama") -> RotaryConfig:
    (output,) = read_rotary(
        ROTARY[family], values, SIZES["hidden_size"], values.get("max_position_embeddings", 2048), length
    )
    return output.config


CONFIGS = {
    "default": RotaryConfig(dim=32),
    "linear": RotaryConfig(dim=32, scaling="linear", factor=4.0),
    "dynamic": RotaryConfig(dim=32, scaling="dynamic", factor=4.0, original_len=4096, length=FAR),
    "yarn": RotaryConfig(dim=32, scaling="yarn", factor=32.0, original_len=4096),
    "llama3": RotaryConfig(
        dim=32, scaling="llama3", factor=8.0, original_len=8192, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "longrope": RotaryConfig(
        dim=32,
        scaling="longrope",
        factor=32.0,
        original_len=4096,
        length=FAR,
        short_factor=(1.0,) * 16,
        long_factor=tuple(1 + i / 3 for i in range(16)),
    ),
    "proportional": RotaryConfig(dim=32, scaling="proportional", factor=2.0, turning_pairs=5),
    "given": RotaryConfig(dim=32, scaling="given", frequencies=tuple(0.5**i for i in range(16))),
}
IDS = torch.zeros((2, 5), dtype=torch.int64)


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
