"""Presets: front-ends of well-known sizes with seeded weights, to try without a checkpoint.

Imports torch only to build one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from preblock import models


@dataclass(frozen=True)
class Preset:
    """A front-end of tables alone to build, and the seed of its weights."""

    build: Callable[[], "models.FrontEnd"]
    seed: int


PRESETS = {
    # Radford et al. 2019, the smallest model: 50257 x 768 tokens, 1024 learned positions.
    "gpt2-small": Preset(lambda: models.GPT2Embeddings(50257, 768, 1024), seed=2019),
    # Vaswani et al. 2017, the base model. Sinusoids know no limit; 4096 is the one configured here.
    "transformer-base": Preset(lambda: models.TransformerEmbedding(32000, 512, 4096), seed=2017),
}


def build_preset(name: str) -> "models.FrontEnd":
    """Build the preset `name` with its seeded weights, the same on every processor.

    Raises:
        KeyError: `name` is no preset.

    """
    import torch

    from preblock.models.modules.initialisers import seeded_

    preset = PRESETS[name]
    with torch.device("meta"):  # without the random values of a constructor
        empty = preset.build()
    tensors = {name: torch.empty(tensor.shape) for name, tensor in empty.state_dict().items()}
    frontend = models.FrontEnd.from_tensors(empty.config, tensors)
    seeded_(frontend, preset.seed)
    return frontend
