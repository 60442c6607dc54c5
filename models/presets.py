"""Presets: front-ends of well-known sizes with seeded weights, to try without a checkpoint."""

import math
from dataclasses import dataclass

import numpy as np

from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.models.seeded_tables import fill_seeded
from preblock.models.steps import Positions, Scale, Tokens


@dataclass(frozen=True)
class Preset:
    """A front-end of tables alone, and the seed of its weights."""

    config: FrontEndConfig
    seed: int


PRESETS = {
    # Radford et al. 2019, the smallest model: 50257 x 768 tokens, 1024 learned positions.
    "gpt2-small": Preset(
        FrontEndConfig(
            family="gpt2",
            steps=(Tokens(rows=50257, width=768), Positions(rows=1024)),
            max_len=1024,
            consumer_scales=False,
        ),
        seed=2019,
    ),
    # Vaswani et al. 2017, the base model. Sinusoids know no limit; 4096 is the one configured here.
    "transformer-base": Preset(
        FrontEndConfig(
            family="transformer",
            steps=(Tokens(rows=32000, width=512), Scale(by=math.sqrt(512)), Positions(rows=4096, table="exact")),
            max_len=4096,
        ),
        seed=2017,
    ),
}


def preset_data(name: str) -> FrontEndData:
    """Return the preset `name` with its seeded weights, the same on every processor.

    Raises:
        KeyError: `name` is no preset.

    """
    config = PRESETS[name].config
    tables = {weight: np.empty(shape, np.float32) for weight, shape in shapes_of(config).items()}
    fill_seeded(tables.values(), PRESETS[name].seed)
    return FrontEndData(config, tables)
