"""Rotary modules of transformers, with every scaling, beside our configurations."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, PreTrainedConfig, Qwen2Config
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from tests.models.checkpoints.rotary_models import ROTARY

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
FAR = 131072
"""Positions up to one less are compared."""


@dataclass(frozen=True)
class PublishedRotary:
    """A module of transformers, and a `config.json` as published for it."""

    config_class: type[PreTrainedConfig]
    module_class: type[nn.Module]
    values: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        # A copy, because transformers writes into its arguments.
        return self.config_class(**copy.deepcopy(self.values))

    def read(self, length: int) -> RotaryConfig:
        return read(self.values, length, self.config_class.model_type)

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the result of the first call of a new module."""
        found: tuple[Tensor, Tensor] = self.module_class(self.config())(torch.zeros(1, dtype=dtype), positions)
        return found


def read(values: dict[str, Any], length: int | None = None, family: str = "llama") -> RotaryConfig:
    (output,) = read_rotary(
        ROTARY[family], values, SIZES["hidden_size"], values.get("max_position_embeddings", 2048), length
    )
    return output.config


def llama(scaling: dict[str, Any] | None = None, **values: object) -> PublishedRotary:
    return PublishedRotary(
        LlamaConfig,
        modeling_llama.LlamaRotaryEmbedding,
        {**SIZES, "rope_scaling": scaling, "rope_theta": 5e5, **values},
    )


def neox(scaling: dict[str, Any] | None) -> PublishedRotary:
    values = {**SIZES, "rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": scaling}
    return PublishedRotary(GPTNeoXConfig, modeling_gpt_neox.GPTNeoXRotaryEmbedding, values)


def qwen(scaling: dict[str, Any]) -> PublishedRotary:
    values = {**SIZES, "max_position_embeddings": FAR, "rope_theta": 1e6, "rope_scaling": scaling}
    return PublishedRotary(Qwen2Config, Qwen2RotaryEmbedding, values)


def phi(**scaling: object) -> PublishedRotary:
    lists = {"short_factor": [1 + i / 50 for i in range(32)], "long_factor": [1 + 0.7 * i for i in range(32)]}
    values = {
        **SIZES,
        "max_position_embeddings": FAR,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **lists, **scaling},
    }
    return PublishedRotary(Phi3Config, Phi3RotaryEmbedding, values)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
PUBLISHED = {
    "llama": llama(),
    "llama without theta": PublishedRotary(LlamaConfig, modeling_llama.LlamaRotaryEmbedding, SIZES),
    "llama linear": llama({"type": "linear", "factor": 3.7}),
    "llama dynamic": llama({"type": "dynamic", "factor": 2.0}),
    "llama3": llama(LLAMA3, max_position_embeddings=FAR),
    "gpt-neox": neox(None),
    "gpt-neox dynamic": neox({"type": "dynamic", "factor": 1.7}),
    "qwen2 yarn": qwen(YARN),
    "qwen2 yarn with its own factor on cos and sin": qwen({**YARN, "attention_factor": 0.8}),
    "qwen2 yarn not rounded": qwen({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
    "qwen2 yarn after short pretraining": qwen({**YARN, "original_max_position_embeddings": 64}),
    "qwen2 yarn after pretraining too short for a turn": qwen({**YARN, "original_max_position_embeddings": 6}),
    "qwen2 yarn of short wavelengths": qwen({**YARN, "original_max_position_embeddings": 1000, "rope_theta": 10.0}),
    "qwen2 yarn for shorter inputs": qwen({**YARN, "factor": 0.5}),
    "llama yarn as deepseek's": llama(DEEPSEEK, max_position_embeddings=163840),
    "phi3 longrope": phi(),
    "phi3 longrope with a factor": phi(factor=2.0),
    "phi3 longrope for shorter inputs": phi(factor=0.5),
    "phi3 longrope with its own factor on cos and sin": phi(attention_factor=1.3),
}
EACH = pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
LENGTHS = (1000, 4096, 4097, FAR)

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
EACH_SCALING = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.zeros((2, 5), dtype=torch.int64)


def some_positions(length: int) -> Tensor:
    """Near and far positions of a sequence of `length` tokens, the last included."""
    near, far = torch.arange(300), torch.arange(300, length, 641)
    return torch.cat((near, far, torch.tensor([length - 2, length - 1]))).unsqueeze(0)


def angles(module: RotaryEmbedding, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = module(torch.zeros(*positions.shape, 1, dtype=dtype), position_ids=positions)
    return found


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
