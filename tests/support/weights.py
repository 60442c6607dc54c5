"""Weights of front-ends for tests and benchmarks."""

import numpy as np
import torch
from torch import nn


def seeded_(module: nn.Module, seed: int) -> None:
    """Fill the parameters of two dimensions of `module` from normal(0, 0.02), the same in every process."""
    generator = np.random.Generator(np.random.PCG64(seed))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(generator.standard_normal(tuple(parameter.shape), np.float32) * 0.02))
