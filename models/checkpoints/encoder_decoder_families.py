"""Rows of the family table: encoder-decoders, a row for each side, with the Hugging Face names of their tensors."""

import math
from collections.abc import Callable

from preblock.models.checkpoints.family import Config, Family
from preblock.models.checkpoints.family_steps import (
    count_lookup_steps,
    learned_position_step,
    norm_step,
    scale_steps,
    sinusoid_position_step,
    token_step,
    weight_keys,
)
from preblock.models.steps import Positions, Step, Tokens


def _scaled(c: Config, default: bool = False) -> list[Step]:
    """Return the embedding scale of most encoder-decoders."""
    return scale_steps(c("scale_embedding", default), math.sqrt(c("d_model")))


SIDES = ("encoder", "decoder")
TIED = ("tie_word_embeddings",)


def _shared(c: Config, side: str, ties: tuple[str, ...] = TIED) -> Tokens:
    """One table for both sides if all of the keys `ties` are true, or one for each side."""
    shared = ["shared"] if all(c(key, True) for key in ties) else []
    return token_step(f"{side}.embed_tokens", *shared)


def _bart(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _shared(c, side),
        *_scaled(c),
        learned_position_step(f"{side}.embed_positions", first=2),
        norm_step(f"{side}.layernorm_embedding", 1e-5),
    ]


def _blenderbot(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_shared(c, side), *_scaled(c), learned_position_step(f"{side}.embed_positions")]


def _marian(side: str, ties: tuple[str, ...]) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _shared(c, side, ties),
        *_scaled(c),
        sinusoid_position_step(
            c, "pair_half", "max_position_embeddings", 1024, weight=weight_keys(f"{side}.embed_positions")
        ),
    ]


def _counted_sinusoids(c: Config, limit: str) -> Positions:
    padding = c("pad_token_id", 1)
    return sinusoid_position_step(c, "tensor2tensor", limit, 1024, counts="ids", first=padding + 1, zero_row=padding)


def _m2m_100(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_shared(c, side), *_scaled(c, True), _counted_sinusoids(c, "max_position_embeddings")]


def _t5(side: str) -> Callable[[Config], list[Step]]:
    """The library shares one table, whatever the config says; a side's own table in the file wins."""
    return lambda _: [token_step(f"{side}.embed_tokens", "shared")]


ENCODER_DECODERS: dict[str, Family] = {
    **{
        f"{name}/{side}": Family(steps=_bart(side), prefix="model.", lookup=count_lookup_steps(False))
        for name in ("bart", "mbart")
        for side in SIDES
    },
    **{
        f"blenderbot/{side}": Family(steps=_blenderbot(side), prefix="model.", lookup=count_lookup_steps(False))
        for side in SIDES
    },
    "blenderbot-small/encoder": Family(
        steps=lambda c: [
            _shared(c, "encoder"),
            *_scaled(c),
            learned_position_step("encoder.embed_positions"),
            norm_step("encoder.layernorm_embedding", 1e-5),
        ],
        prefix="model.",
        lookup=count_lookup_steps(False),
    ),
    # It normalises the tokens, never scales them despite its config, and adds positions last.
    "blenderbot-small/decoder": Family(
        steps=lambda c: [
            _shared(c, "decoder"),
            norm_step("decoder.layernorm_embedding", 1e-5),
            learned_position_step("decoder.embed_positions"),
        ],
        prefix="model.",
    ),
    **{
        f"{name}/{side}": Family(
            steps=_marian(side, ties),
            prefix="model.",
            lookup=count_lookup_steps(False) if side == "encoder" else lambda _: 1,
            consumer_scales=side == "decoder",
        )
        for name, ties in (("marian", (*TIED, "share_encoder_decoder_embeddings")), ("pegasus", TIED))
        for side in SIDES
    },
    **{
        f"m2m_100/{side}": Family(steps=_m2m_100(side), prefix="model.", padding=1, lookup=count_lookup_steps(True))
        for side in SIDES
    },
    "speech_to_text/decoder": Family(
        steps=lambda c: [
            token_step("decoder.embed_tokens"),
            *scale_steps(c("scale_embedding", True), math.sqrt(c("d_model", 256))),
            _counted_sinusoids(c, "max_target_positions"),
        ],
        prefix="model.",
        padding=1,
        lookup=count_lookup_steps(True),
    ),
    # `scale_embedding` is read by the library, and never used.
    "whisper/decoder": Family(
        steps=lambda _: [token_step("decoder.embed_tokens"), learned_position_step("decoder.embed_positions")],
        prefix="model.",
    ),
    **{f"t5/{side}": Family(steps=_t5(side)) for side in SIDES},
}
