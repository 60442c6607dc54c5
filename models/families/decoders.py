"""Rows of decoders with a token table as front-end, optionally scaled; positions enter in attention."""

from dataclasses import replace

from preblock.models.families.family import UNTIED, Family, Tied
from preblock.models.families.named_steps import token_step
from preblock.models.families.readings import Reading
from preblock.models.families.rotary import Rotary
from preblock.models.steps import Scale


def decoder(limit: int | None, tied: Tied | None, rotary: Rotary | None, *names: str, prefix: str = "model.") -> Family:
    """Return a decoder with a token table under any of several names; default `embed_tokens`."""
    return Family(
        steps=lambda _: [token_step(*names or ("embed_tokens",))],
        prefix=prefix,
        limit=None if limit is None else ("max_position_embeddings", limit),
        rotary=rotary,
        bias=None,
        tied=tied,
        consumers=None,
    )


def multiplied(limit: int, rotary: Rotary, consumers: tuple[Reading, ...], lookup: int = 1) -> Family:
    """Return a decoder with `embedding_multiplier`. `lookup`: 1 if the model scales `inputs_embeds`, else 2."""
    return replace(
        decoder(limit, UNTIED, rotary),
        steps=lambda c: [token_step("embed_tokens"), Scale(by=c("embedding_multiplier", 1.0))],
        consumers=consumers,
        lookup=lambda _: lookup,
        consumer_scales=lookup == 1,
    )


def text_side(limit: int, tied: Tied, rotary: Rotary, *sections: str) -> Family:
    """Return the text side of a model of texts and images."""
    side = decoder(limit, tied, rotary, "language_model.embed_tokens", "embed_tokens")
    return replace(side, sections=("text_config", *sections))
