"""How tables start."""

import numpy as np
import torch
from torch import Tensor, nn

STANDARD_DEVIATION = 0.02
"""Of every table (Devlin et al. 2018, Radford et al. 2019)."""


def normal_(table: Tensor) -> None:
    """Fill `table` from normal(0, 0.02), with torch's own generator."""
    nn.init.normal_(table, std=STANDARD_DEVIATION)


def seeded_(module: nn.Module, seed: int) -> None:
    """Fill the tables of `module` from normal(0, 0.02) with PCG64(seed): the same weights on every processor.

    Tables are the parameters of two dimensions, filled in order of definition; others keep their values.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                values = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(values * np.float32(STANDARD_DEVIATION)))
