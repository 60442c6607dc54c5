"""Configurations of front-ends: every kind of step, of positions and of further outputs."""

from dataclasses import replace
from typing import Any

from preblock.models.config import FrontEndConfig
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Segments,
    Step,
    Tokens,
    Weights,
)

V, D, M, PADDING = 90, 40, 12, 3
TOKENS = Tokens(rows=V, width=D)


def config_of(*steps: Step, **others: Any) -> FrontEndConfig:
    values: dict[str, Any] = {"family": "x", "steps": (TOKENS, *steps), "max_len": M, **others}
    return FrontEndConfig(**values)


LEVELS = Levels(levels=(Segments(rows=5, input="word", by=0.3), Segments(rows=V, table="tokens", input="add")))
"""One input is named like a node of a graph."""
EVERY_STEP: tuple[Step, ...] = (
    Scale(by=3.3, cast=True),
    Weights(rows=V),
    Segments(rows=3),
    Segments(rows=V, table="tokens", input="speaker", by=2.5, needed=True),
    LEVELS,
    Positions(rows=M + 2, counts="mask", first=2),
    Mask(),
    Norm(eps=1e-5),
    RmsNorm(eps=1e-6),
    Project(width=6),
    Project(width=8, bias=None),
    Norm(eps=1e-5, bias=None),
    RmsNorm(eps=1e-6, weight=None),
)
YARN = RotaryConfig(dim=4, scaling="yarn", factor=32.0, original_len=4, truncate=False, attention_factor=1.1)
LONGROPE = RotaryConfig(
    dim=4, scaling="longrope", factor=2.0, original_len=8, length=16, short_factor=(1.0, 1.5), long_factor=(2.0, 1e-5)
)
ROTARY = (
    RotaryOutput(config=RotaryConfig(dim=8)),
    RotaryOutput(config=RotaryConfig(dim=8, angles="float64"), name="wide", form="half", dtype="float16"),
    RotaryOutput(config=RotaryConfig(dim=6, theta=1e6, scaling="linear", factor=2.0), name="linear", form="fused"),
    RotaryOutput(config=YARN, name="yarn", layout="interleaved"),
    RotaryOutput(config=LONGROPE, name="long"),
)
NGRAMS = NgramConfig(layers=(0, 3), size=3, heads=2, width=128, base=31, multiple=8, seed=5, reset_id=2)
PER_LAYER = PerLayerConfig(layers=3, width=32, rows=V - 5, eps=1e-6)
DESCRIBED: dict[str, FrontEndConfig] = {
    "tokens": config_of(max_len=None),
    "learned": config_of(Positions(rows=M)),
    "first": config_of(Scale(by=0.1 + 0.2), Positions(rows=M + 2, first=2)),
    "exact": config_of(Scale(by=40**0.5), Positions(table="exact", first=3), lookup=2),
    "exact rows": config_of(Positions(table="exact", rows=M + 3, first=3)),
    "far": config_of(Positions(table="exact"), max_len=2**31),
    "hybrid": config_of(Positions(rows=M // 2, table="hybrid")),
    "grid": config_of(Positions(rows=M, table="exact", grid=(3, 4))),
    "factorised": config_of(Positions(rows=M, table="factorised", grid=(4, 3))),
    "ids": config_of(Positions(rows=M + 4, counts="ids", first=4), padding_idx=PADDING),
    **{
        recipe: config_of(Positions(rows=M + 2, table=recipe, counts="ids", first=2, zero_row=1), padding_idx=PADDING)
        for recipe in ("pair_half", "pair_interleaved", "pair_half_float32", "tensor2tensor")
    },
    "bfloat16 recipe": config_of(Positions(table="pair_half", rows=M), arithmetic="bfloat16"),
    "levels": config_of(LEVELS, max_len=None),
    "norms": config_of(Norm(eps=1e-12), Norm(eps=0.1, bias=None), RmsNorm(eps=0.0, weight=None)),
    "rotary": config_of(Norm(eps=1e-5), rotary=ROTARY),
    **{
        f"every step in {name}": config_of(*EVERY_STEP, arithmetic=name, lookup=2)
        for name in ("float32", "float16", "bfloat16")
    },
    "every field": replace(
        config_of(*EVERY_STEP, arithmetic="bfloat16", lookup=2, padding_idx=1, refused_ids=(2, 3), dropout=0.25),
        family='own "family" \\ é',
        consumer_scales=True,
    ),
}
"""Front-ends that `frontend.toml` can describe."""
CONFIGS = DESCRIBED | {
    "layers": config_of(Scale(by=6.3), per_layer=PER_LAYER, lookup=2),
    "ngrams": config_of(ngrams=NGRAMS),
}
