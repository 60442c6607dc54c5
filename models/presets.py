"""Presets: front-ends of well-known sizes with seeded weights, to try without a checkpoint."""

import math
from dataclasses import dataclass

import numpy as np

from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.models.steps import Positions, Scale, Tokens

STD = 0.02
"""Standard deviation of the weights."""


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
    """Return the preset `name` with weights from normal(0, 0.02): the same on every processor.

    Raises:
        KeyError: `name` is no preset.

    """
    config = PRESETS[name].config
    # Another C library may round the logarithms of rare values otherwise, by one unit in the last place.
    generator = np.random.Generator(np.random.PCG64(PRESETS[name].seed))
    tables = {}
    for weight, shape in shapes_of(config).items():
        tables[weight] = generator.standard_normal(shape, np.float32)
        tables[weight] *= np.float32(STD)
    return FrontEndData(config, tables)
