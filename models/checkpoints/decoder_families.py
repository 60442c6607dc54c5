"""Rows of the family table: decoders, with the Hugging Face names of their tensors."""

import math
from collections.abc import Callable
from dataclasses import replace

from preblock.models.checkpoints.family import Config, Family
from preblock.models.checkpoints.family_steps import (
    chosen_segment_steps,
    count_lookup_steps,
    learned_position_step,
    norm_step,
    project_step,
    scale_steps,
    sinusoid_position_step,
    token_step,
    weight_keys,
)
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.steps import Positions, Scale, Step

MAX_SHARDS = 2**16
"""Most parts of a table of n-grams in a checkpoint."""


def _opt(c: Config) -> list[Step]:
    projected = c("word_embed_proj_dim", c("hidden_size")) != c("hidden_size")
    positions = Positions(weight=weight_keys("decoder.embed_positions"), counts="mask", first=2)
    return [
        token_step("decoder.embed_tokens"),
        *([project_step("decoder.project_in", bias=False)] if projected else []),
        positions,
    ]


def _rotary(
    tokens: str, prefix: str, limit: int, key: str = "max_position_embeddings", segments: bool = False
) -> Family:
    """A decoder with positions in attention only: its front-end is the token table."""
    return Family(
        steps=lambda c: [token_step(tokens), *chosen_segment_steps(c)],
        prefix=prefix,
        limit=(key, limit),
        segments=segments,
    )


def _gpt(tokens: str, positions: str) -> Family:
    """A decoder with learned positions, and segments from the token table."""
    return Family(
        steps=lambda c: [token_step(tokens), learned_position_step(positions), *chosen_segment_steps(c)],
        prefix="transformer.",
        segments=True,
    )


def _gemma_family(limit: int, part: str = "") -> Family:
    return Family(
        steps=lambda c: [token_step(f"{part}embed_tokens"), Scale(by=math.sqrt(c("hidden_size")), cast=True)],
        prefix="model.",
        limit=("max_position_embeddings", limit),
        lookup=lambda _: 2,
    )


def _qwen_ngrams(path: str) -> Callable[[Config], NgramConfig | None]:
    """Return the n-gram embeddings of a config, for tensors below `path`; none without such layers."""

    def read(c: Config) -> NgramConfig | None:
        layers = sorted({layer - 1 for layer in c("ple_layer_ids", [])})
        if not layers:
            return None
        end = c("eos_token_id")
        shards = c("split_ngram_parts", 512)
        if not 1 <= shards <= MAX_SHARDS:
            raise ValueError(f"split_ngram_parts: got {shards}, expected 1 to {MAX_SHARDS}")
        tables = [f"{path}layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in layers]
        return NgramConfig(
            layers=tuple(layers),
            size=c("ngram_size", 3),
            heads=c("heads_per_ngram", 8),
            width=c("ple_embed_dim", c("hidden_size", 2048)),
            base=c("ngram_vocab_size_base", 20_000_000),
            multiple=c("make_ngram_vocab_size_divisible_by", 128),
            seed=c("seed", 1234),
            reset_id=end[0] if isinstance(end, list) else end,
            # One tensor in a file of a running model, several in a published one.
            weights=tuple(
                (weight_keys(table), *(weight_keys(f"{table}.shard_{shard}") for shard in range(shards)))
                for table in tables
            ),
        )

    return read


def _qwen4(path: str, *sections: str) -> Family:
    return Family(
        steps=lambda _: [token_step(f"{path}embed_tokens")],
        prefix="model.",
        limit=("max_position_embeddings", 32768),
        ngrams=_qwen_ngrams(path),
        copies=lambda c: c("hc_count", 4),
        sections=sections,
    )


def _per_layer(c: Config, layers: int, part: str) -> PerLayerConfig:
    names = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
    tokens, project, norm = (weight_keys(f"{part}{name}") for name in names)
    return PerLayerConfig(
        layers=c("num_hidden_layers", layers),
        width=c("hidden_size_per_layer_input", 256),
        rows=c("vocab_size_per_layer_input", 262144),
        eps=c("rms_norm_eps", 1e-6),
        weights=(tokens, project, norm),
    )


def _gemma4(part: str = "") -> Family:
    def per_layer(c: Config) -> PerLayerConfig | None:
        if c("hidden_size_per_layer_input", 256) == 0:
            return None
        config = _per_layer(c, 30, part)
        tokens = c("vocab_size", 262144)
        if config.rows != tokens:  # the library reads beyond a smaller table
            raise ValueError(f"vocab_size_per_layer_input: got {config.rows}, expected {tokens}, as vocab_size says")
        return config

    return replace(_gemma_family(131072, part), per_layer=per_layer)


def _gemma3n(part: str = "") -> Family:
    return replace(
        _gemma_family(32768, part),
        per_layer=lambda c: _per_layer(c, 35, part),
        streams=lambda c: c("altup_num_inputs", 4),
    )


def _ids_of_other_inputs(c: Config) -> list[int]:
    """Return the ids replaced by Gemma 4 and Gemma 4 Unified before their text part."""
    defaults = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
    found = (c.nullable(key, default) for key, default in defaults.items())
    return sorted({token for token in found if type(token) is int and 0 <= token < _vocabulary(c)})


def _ids_of_other_tables(c: Config) -> list[int]:
    """Return the ids of Gemma 3n with rows in the tables of its image and audio parts."""
    parts = {"vision_config": 262144, "audio_config": 262272}
    first = min(_part(c, key)("vocab_offset", default) for key, default in parts.items())
    return list(range(max(first, 0), _vocabulary(c)))


def _vocabulary(c: Config) -> int:
    size: int = _part(c, "text_config")("vocab_size", 262144)
    return size


def _part(c: Config, key: str) -> Config:
    values = c(key, {})
    if not isinstance(values, dict):
        raise ValueError(f"{key}: got {values!r}, expected an object")
    return Config(values)


DECODERS: dict[str, Family] = {
    "gpt2": _gpt("wte", "wpe"),
    "gpt_neo": _gpt("wte", "wpe"),
    "gpt_bigcode": _gpt("wte", "wpe"),
    "openai-gpt": _gpt("tokens_embed", "positions_embed"),
    "gptj": _rotary("wte", "transformer.", 2048, "n_positions", segments=True),
    "codegen": _rotary("wte", "transformer.", 2048, "n_positions", segments=True),
    "ctrl": Family(
        steps=lambda c: [
            token_step("w"),
            Scale(by=math.sqrt(c("n_embd", 1280))),
            sinusoid_position_step(c, "pair_half_float32", "n_positions", 256),
            *chosen_segment_steps(c, by=math.sqrt(c("n_embd", 1280))),
        ],
        prefix="transformer.",
        consumer_scales=True,
        segments=True,
    ),
    "opt": Family(steps=_opt, prefix="model."),
    "biogpt": Family(
        steps=lambda c: [
            token_step("embed_tokens"),
            *scale_steps(c("scale_embedding", True), math.sqrt(c("hidden_size"))),
            learned_position_step("embed_positions", first=2),
        ],
        prefix="biogpt.",
        lookup=count_lookup_steps(True),
    ),
    "xglm": Family(
        steps=lambda c: [
            token_step("embed_tokens"),
            *scale_steps(c("scale_embedding", True), math.sqrt(c("d_model", 1024))),
            sinusoid_position_step(
                c, "tensor2tensor", "max_position_embeddings", 2048, first=2, zero_row=c("pad_token_id", 1)
            ),
        ],
        prefix="model.",
        lookup=count_lookup_steps(True),
    ),
    "bloom": Family(
        steps=lambda c: [
            token_step("word_embeddings"),
            norm_step("word_embeddings_layernorm", c("layer_norm_epsilon", 1e-5)),
        ],
        prefix="transformer.",
    ),
    "mpt": _rotary("wte", "transformer.", 2048, "max_seq_len"),
    "falcon": _rotary("word_embeddings", "transformer.", 2048),
    "llama": _rotary("embed_tokens", "model.", 2048),
    "mistral": _rotary("embed_tokens", "model.", 131072),
    "qwen2": _rotary("embed_tokens", "model.", 32768),
    "qwen3": _rotary("embed_tokens", "model.", 32768),
    "phi": _rotary("embed_tokens", "model.", 2048),
    "phi3": _rotary("embed_tokens", "model.", 4096),
    "gpt_neox": _rotary("embed_in", "gpt_neox.", 2048),
    "granite": Family(
        steps=lambda c: [token_step("embed_tokens"), Scale(by=c("embedding_multiplier", 1.0))],
        prefix="model.",
        limit=("max_position_embeddings", 2048),
        consumer_scales=True,
    ),
    "gemma": _gemma_family(8192),
    "gemma2": _gemma_family(8192),
    "gemma3_text": _gemma_family(131072),
    "qwen4_exp_text": _qwen4(""),
    "qwen4_exp/text": _qwen4("language_model.", "text_config"),
    "gemma3n_text": _gemma3n(),
    "gemma3n/text": replace(_gemma3n("language_model."), sections=("text_config",), refused=_ids_of_other_tables),
    "gemma4_text": _gemma4(),
    "gemma4_unified_text": _gemma_family(262144),
    "gemma4_unified/text": replace(
        _gemma_family(262144, "language_model."), sections=("text_config",), refused=_ids_of_other_inputs
    ),
    "gemma4/text": replace(_gemma4("language_model."), sections=("text_config",), refused=_ids_of_other_inputs),
}
