"""How tables start.

Letters: D model width, M rows of a position table.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from preblock.models.modules.sinusoids import sinusoid

STANDARD_DEVIATION = 0.02
"""Of every table (Devlin et al. 2018, Radford et al. 2019)."""


def normal_(table: Tensor) -> None:
    """Fill `table` from normal(0, 0.02), with torch's own generator; one on the device "meta" has nothing to fill."""
    if not table.is_meta:  # for which torch would import its compiler: more than two seconds
        nn.init.normal_(table, std=STANDARD_DEVIATION)


def seeded_(module: nn.Module, seed: int) -> None:
    """Fill the tables of `module` from normal(0, 0.02) with PCG64(seed): the same weights on every processor.

    Tables are the parameters of two dimensions, float32, filled in order of definition; others keep their values.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                generator.standard_normal(dtype=np.float32, out=parameter.detach().numpy())
                parameter.mul_(STANDARD_DEVIATION)


def sinusoidal_(table: Tensor, base: float = 10000.0) -> None:
    """Fill `table` (M, D) with the sinusoids of the positions 0 to M - 1, a warm start that training may leave.

    Args:
        table: (M, D), D even.
        base: 10000 in Vaswani et al. 2017.

    Raises:
        ValueError: D is odd.

    """
    with torch.no_grad():
        table.copy_(sinusoid(torch.arange(table.shape[0], device=table.device), table.shape[1], base))


def pretrained_(table: Tensor, values: Tensor) -> None:
    """Copy `values` into `table`.

    Raises:
        ValueError: they are of another shape.

    """
    if values.shape != table.shape:
        raise ValueError(f"values: got shape {tuple(values.shape)}, allowed {tuple(table.shape)}")
    with torch.no_grad():
        table.copy_(values)


INITIALISERS: dict[str, Callable[..., object]] = {
    "normal": normal_,
    "xavier_uniform": nn.init.xavier_uniform_,  # Glorot & Bengio 2010: +-sqrt(6 / (M + D))
    "zeros": nn.init.zeros_,
    "sinusoidal": sinusoidal_,
    "pretrained": pretrained_,
}
"""How a position table may start, by name. Each fills the table that it is given first, in place."""
