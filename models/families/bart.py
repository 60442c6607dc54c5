"""Rows of BART, and of encoder-decoders like it: a row for each side."""

from collections.abc import Callable
from dataclasses import replace

from preblock.models.families.family import UNTIED, Family, absolute
from preblock.models.families.named_steps import (
    count_lookup_steps,
    counted_sinusoid_step,
    learned_position_step,
    norm_step,
    root_scale,
    sinusoid_position_step,
    token_step,
    weight_keys,
    when,
)
from preblock.models.families.published_config import Config
from preblock.models.steps import Step, Tokens

_TIE = "tie_word_embeddings"
_OTHER = {"encoder": "decoder", "decoder": "encoder"}


def _tokens(c: Config, side: str, ties: tuple[str, ...] = (_TIE,)) -> Tokens:
    """One table for both sides and the head if all of the keys `ties` are true, or one for each side."""
    shared = ("shared", "lm_head", f"{_OTHER[side]}.embed_tokens") if all(c(key, True) for key in ties) else ()
    return token_step(f"{side}.embed_tokens", *shared)


def _scaled(c: Config, default: bool = False) -> list[Step]:
    """Return the embedding scale of most encoder-decoders."""
    return when(c("scale_embedding", default), root_scale(c, key="d_model"))


def _bart(side: str, first: int = 2) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _tokens(c, side),
        *_scaled(c),
        learned_position_step(f"{side}.embed_positions", first=first),
        norm_step(f"{side}.layernorm_embedding", 1e-5),
    ]


def _blenderbot(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_tokens(c, side), *_scaled(c), learned_position_step(f"{side}.embed_positions")]


def _marian(side: str, *ties: str) -> Callable[[Config], list[Step]]:
    return lambda c: [
        _tokens(c, side, (_TIE, *ties)),
        *_scaled(c),
        sinusoid_position_step(
            c, "pair_half", "max_position_embeddings", 1024, weight=weight_keys(f"{side}.embed_positions")
        ),
    ]


def _m2m_100(side: str) -> Callable[[Config], list[Step]]:
    return lambda c: [_tokens(c, side), *_scaled(c, True), counted_sinusoid_step(c, "max_position_embeddings")]


_ENCODER = replace(absolute(_bart("encoder"), "model.", None), lookup=count_lookup_steps(False))
_DECODER = replace(_ENCODER, steps=_bart("decoder"), tied=UNTIED)
_SCALES = replace(_DECODER, lookup=lambda _: 1, consumer_scales=True)
_SHARES = "share_encoder_decoder_embeddings"

BART: dict[str, Family] = {
    "bart/encoder": _ENCODER,
    "bart/decoder": _DECODER,
    "mbart/encoder": _ENCODER,
    "mbart/decoder": _DECODER,
    "blenderbot/encoder": replace(_ENCODER, steps=_blenderbot("encoder")),
    "blenderbot/decoder": replace(_DECODER, steps=_blenderbot("decoder")),
    "blenderbot-small/encoder": replace(_ENCODER, steps=_bart("encoder", first=0)),
    # It normalises the tokens, never scales them despite its config, and adds positions last.
    "blenderbot-small/decoder": replace(
        _DECODER,
        steps=lambda c: [
            _tokens(c, "decoder"),
            norm_step("decoder.layernorm_embedding", 1e-5),
            learned_position_step("decoder.embed_positions"),
        ],
        lookup=lambda _: 1,
    ),
    "marian/encoder": replace(_ENCODER, steps=_marian("encoder", _SHARES)),
    "marian/decoder": replace(_SCALES, steps=_marian("decoder", _SHARES), vocab=("decoder_vocab_size", "vocab_size")),
    "pegasus/encoder": replace(_ENCODER, steps=_marian("encoder")),
    "pegasus/decoder": replace(_SCALES, steps=_marian("decoder")),
    "m2m_100/encoder": replace(_ENCODER, steps=_m2m_100("encoder"), padding=1, lookup=count_lookup_steps(True)),
    "m2m_100/decoder": replace(_DECODER, steps=_m2m_100("decoder"), padding=1, lookup=count_lookup_steps(True)),
}
