"""Rows of GPT, and of other decoders from before LLaMA; and of GPT-OSS."""

import math
from dataclasses import replace

from preblock.models.families.decoders import decoder
from preblock.models.families.family import TIED, UNTIED, Family, Tied
from preblock.models.families.named_steps import (
    chosen_segment_steps,
    count,
    count_lookup_steps,
    learned_position_step,
    norm_step,
    project_step,
    root_scale,
    sinusoid_position_step,
    token_step,
    weight_keys,
    when,
)
from preblock.models.families.published_config import Config
from preblock.models.families.rotary import Rotary, theta
from preblock.models.modules.bias import AlibiConfig
from preblock.models.steps import Positions, Step


def _opt(c: Config) -> list[Step]:
    projected = c("word_embed_proj_dim", c("hidden_size")) != c("hidden_size")
    return [
        token_step("decoder.embed_tokens"),
        *when(projected, project_step("decoder.project_in", bias=False)),
        Positions(weight=weight_keys("decoder.embed_positions"), counts="mask", first=2),
    ]


def _falcon_bias(c: Config) -> AlibiConfig | None:
    # Once, as its default attention adds it; the library's eager attention adds it twice.
    if not c("alibi", False):
        return None
    heads = count(c, 71, "num_attention_heads")
    return AlibiConfig(
        heads=heads,
        anchor="first",
        recipe="float32_powers",
        arithmetic="bfloat16",
        divisor=math.sqrt(count(c, 4544, "hidden_size") // heads),
    )


_DECODER = decoder(None, TIED, None, prefix="transformer.")


def _gpt(tokens: str, positions: str) -> Family:
    """A decoder with learned positions, and segments from the token table."""
    return replace(
        _DECODER,
        steps=lambda c: [token_step(tokens), learned_position_step(positions), *chosen_segment_steps(c)],
        segments=True,
    )


_GPT2 = _gpt("wte", "wpe")
_GPTJ = replace(
    _GPT2,
    steps=lambda c: [token_step("wte"), *chosen_segment_steps(c)],
    limit=("n_positions", 2048),
    rotary=Rotary(dim=("rotary_dim", 64), thetas=theta(10000.0, None), types=(), layout="interleaved"),
    tied=UNTIED,
)

GPT: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_neo": _GPT2,
    "gpt_bigcode": _GPT2,
    "openai-gpt": _gpt("tokens_embed", "positions_embed"),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "ctrl": replace(
        _GPT2,
        steps=lambda c: [
            token_step("w"),
            root_scale(c, 1280, "n_embd"),
            sinusoid_position_step(c, "pair_half_float32", "n_positions", 256),
            *chosen_segment_steps(c, by=root_scale(c, 1280, "n_embd").by),
        ],
        consumer_scales=True,
    ),
    "opt": replace(_DECODER, steps=_opt, prefix="model."),
    "biogpt": replace(
        _DECODER,
        steps=lambda c: [
            token_step("embed_tokens"),
            *when(c("scale_embedding", True), root_scale(c)),
            learned_position_step("embed_positions", first=2),
        ],
        prefix="biogpt.",
        tied=Tied(True, "output_projection.weight"),
        lookup=count_lookup_steps(True),
    ),
    "xglm": replace(
        _DECODER,
        steps=lambda c: [
            token_step("embed_tokens"),
            *when(c("scale_embedding", True), root_scale(c, 1024, "d_model")),
            sinusoid_position_step(
                c, "tensor2tensor", "max_position_embeddings", 2048, first=2, zero_row=c("pad_token_id", 1)
            ),
        ],
        prefix="model.",
        lookup=count_lookup_steps(True),
    ),
    "bloom": replace(
        _DECODER,
        steps=lambda c: [
            token_step("word_embeddings"),
            norm_step("word_embeddings_layernorm", c("layer_norm_epsilon", 1e-5)),
        ],
        bias=lambda c: AlibiConfig(heads=count(c, 8, "n_head"), anchor="first", recipe="float32_powers"),
    ),
    "mpt": replace(
        decoder(2048, TIED, None, "wte", prefix="transformer."),
        limit=("max_seq_len", 2048),
        bias=lambda c: AlibiConfig(heads=count(c, 16, "n_heads"), anchor="last", recipe="float32_reciprocals"),
        # The library always adds ALiBi with a maximum of 8, and ignores the config. If the config differs, the model
        # was trained with another bias.
        only={"attn_config.alibi": (True,), "attn_config.alibi_bias_max": (8,)},
    ),
    "falcon": replace(
        decoder(
            2048, TIED, Rotary(heads=71, when=lambda c: not c("alibi", False)), "word_embeddings", prefix="transformer."
        ),
        bias=_falcon_bias,
        only={"alibi": (True, False)},
    ),
    "gpt_neox": decoder(
        2048,
        UNTIED,
        Rotary(heads=64, share=("rotary_pct", 0.25), thetas=theta(10000.0, "rotary_emb_base")),
        "embed_in",
        prefix="gpt_neox.",
    ),
    "gpt_oss": decoder(
        131072,
        UNTIED,
        Rotary(
            heads=64,
            head_dim=64,
            thetas=theta(150_000.0),
            default={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
            strict=True,
        ),
    ),
}
