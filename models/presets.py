"""Presets: front-ends of well-known sizes with seeded weights, to try without a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from preblock.models.embeddings import GPT2Embeddings, TransformerEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.modules.initialisers import seeded_


@dataclass(frozen=True)
class Preset:
    """A front-end of tables alone to build, and the seed of its weights."""

    build: Callable[[], FrontEnd]
    seed: int


PRESETS = {
    # Radford et al. 2019, the smallest model: 50257 x 768 tokens, 1024 learned positions.
    "gpt2-small": Preset(lambda: GPT2Embeddings(50257, 768, 1024), seed=2019),
    # Vaswani et al. 2017, the base model. Sinusoids know no limit; 4096 is the one configured here.
    "transformer-base": Preset(lambda: TransformerEmbedding(32000, 512, 4096), seed=2017),
}


def build_preset(name: str) -> FrontEnd:
    """Build the preset `name` with its seeded weights, the same on every processor.

    Raises:
        KeyError: `name` is no preset.

    """
    preset = PRESETS[name]
    with torch.device("meta"):  # without the random values of a constructor
        empty = preset.build()
    tensors = {name: torch.empty(tensor.shape) for name, tensor in empty.state_dict().items()}
    frontend = FrontEnd.from_tensors(empty.config, tensors)
    seeded_(frontend, preset.seed)
    return frontend
