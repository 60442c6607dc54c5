"""Rows of the family table: decoders with a token table as front-end, optionally scaled; positions enter in attention.

State-space models are among them. Letters: M maximum length.
"""

from collections.abc import Mapping
from dataclasses import replace

from preblock.models.checkpoints.family import WHOLE, Family
from preblock.models.checkpoints.family_steps import token_step
from preblock.models.steps import Scale

LIMITS: Mapping[str, int] = {
    "bamba": 262144,
    "cohere": 8192,
    "cohere2": 8192,
    "deepseek_v2": 2048,
    "deepseek_v3": 4096,
    "deepseek_v32": 163840,
    "ernie4_5": 131072,
    "ernie4_5_moe": 131072,
    "exaone4": 2048,
    "glm": 131072,
    "glm4": 131072,
    "glm4_moe": 131072,
    "glm4v_moe_text": 65536,
    "glm4v_text": 32768,
    "glm_ocr_text": 131072,
    "gpt_oss": 131072,
    "hunyuan_v1_dense": 2048,
    "hunyuan_v1_moe": 2048,
    "jamba": 262144,
    "llama4_text": 131072,
    "minimax": 131072,
    "minimax_m2": 196608,
    "mixtral": 131072,
    "nemotron": 4096,
    "olmo": 2048,
    "olmo2": 2048,
    "olmo3": 2048,
    "olmoe": 4096,
    "phimoe": 131072,
    "qwen2_moe": 32768,
    "qwen3_5_moe_text": 32768,
    "qwen3_5_text": 32768,
    "qwen3_moe": 32768,
    "qwen3_next": 32768,
    "sarvam_mla": 4096,
    "seed_oss": 524288,
    "smollm3": 32768,
    "stablelm": 4096,
    "starcoder2": 4096,
}
"""Model type -> default of `max_position_embeddings` in transformers. Each type names its table `embed_tokens`."""


def _tokens(limit: int, *names: str) -> Family:
    """Return a decoder with a token table under any of several names."""
    return Family(steps=lambda _: [token_step(*names)], prefix="model.", limit=("max_position_embeddings", limit))


def _multiplied(limit: int, lookup: int) -> Family:
    """Return a decoder with `embedding_multiplier`. `lookup`: 1 if the model scales `inputs_embeds`, else 2."""
    return Family(
        steps=lambda c: [token_step("embed_tokens"), Scale(by=c("embedding_multiplier", 1.0))],
        prefix="model.",
        limit=("max_position_embeddings", limit),
        lookup=lambda _: lookup,
        consumer_scales=lookup == 1,
    )


def _language_part(limit: int, *sections: str) -> Family:
    """Return the text side of a model of texts and images."""
    return Family(
        steps=lambda _: [token_step("language_model.embed_tokens", "embed_tokens")],
        prefix="model.",
        limit=("max_position_embeddings", limit),
        sections=("text_config", *sections),
    )


_GLM4V_TYPES = ("glm4v_text", "glm4v_moe_text")
_GLM46V = replace(
    _language_part(32768),
    limit=("max_position_embeddings", lambda c: LIMITS[c("model_type", _GLM4V_TYPES[0])]),
    only={"model_type": _GLM4V_TYPES},
)
_MAMBA = Family(steps=lambda _: [token_step("embeddings", "embedding")], prefix="backbone.")

TOKEN_DECODERS: dict[str, Family] = {
    **{name: _tokens(limit, "embed_tokens") for name, limit in LIMITS.items()},
    # Published files have names from before the library's support.
    "exaone": _tokens(4096, "embed_tokens", "transformer.wte"),
    "sarvam_moe": _tokens(131072, "embed_tokens", "word_embeddings"),
    **{name: _multiplied(2048, 1) for name in ("granitemoe", "granitemoehybrid", "granitemoeshared")},
    "falcon_h1": _multiplied(8192, 2),
    # Older files have no object `text_config`, and its values beside the others.
    "qwen2_vl/text": _language_part(32768, WHOLE),
    "qwen2_5_vl/text": _language_part(32768, WHOLE),
    "qwen3_vl/text": _language_part(128000),
    "qwen3_vl_moe/text": _language_part(128000),
    "qwen3_5/text": _language_part(32768),
    "qwen3_5_moe/text": _language_part(32768),
    "glm4v/text": _language_part(32768),
    "glm4v_moe/text": _language_part(65536),
    "glm46v/text": _GLM46V,
    "glmga/text": _GLM46V,
    "glm_ocr/text": _language_part(131072),
    "ernie4_5_vl_moe/text": _language_part(131072),
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "falcon_mamba": _MAMBA,
    "nemotron_h": Family(
        steps=lambda _: [token_step("embeddings")], prefix="backbone.", limit=("max_position_embeddings", 4096)
    ),
    "rwkv": Family(steps=lambda _: [token_step("embeddings")], prefix="rwkv.", limit=("context_length", 1024)),
}
