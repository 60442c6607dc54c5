"""Initial values of tables.

Letters: D model width, M rows of a position table.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from preblock.models.modules.sinusoids import sinusoid

DEFAULT_STD = 0.02
"""Standard deviation of the tables of BERT and GPT-2 (Devlin et al. 2018, Radford et al. 2019)."""
Initialiser = Literal["normal", "xavier_uniform", "zeros", "sinusoidal"]
"""Names of the `INITIALISERS` without values."""


def initialise_(table: Tensor, init: Initialiser | Tensor = "normal", std: float = DEFAULT_STD) -> None:
    """Fill `table` as `init` says; a table on the device "meta" has no values to fill.

    Args:
        table: float (rows, D).
        init: a name of `INITIALISERS`, or pretrained values of the shape of `table`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known or of another shape, `std` is not above 0, or D is odd for "sinusoidal".

    """
    if isinstance(init, Tensor):
        pretrained_(table, init)
        return
    names = [name for name in INITIALISERS if name != "pretrained"]
    if init not in names:
        raise ValueError(f"init: got {init!r}, expected {', '.join(names)}, or a tensor of pretrained values")
    if not 0 < std < math.inf:
        raise ValueError(f"std: got {std!r}, expected a number above 0")
    if table.is_meta:  # torch would import its compiler for it, in more than two seconds
        return
    if init == "normal":
        normal_(table, std)
    else:
        INITIALISERS[init](table)


def normal_(table: Tensor, std: float = DEFAULT_STD) -> None:
    """Fill `table` from normal(0, std) with torch's own generator."""
    nn.init.normal_(table, std=std)


def sinusoidal_(table: Tensor, base: float = 10000.0) -> None:
    """Fill `table` (M, D) with the sinusoids of the positions 0 to M - 1, as a trainable warm start.

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
        ValueError: their shape differs from the shape of `table`.

    """
    if values.shape != table.shape:
        raise ValueError(f"pretrained: got shape {tuple(values.shape)}, expected {tuple(table.shape)}")
    with torch.no_grad():
        table.copy_(values)


INITIALISERS: dict[str, Callable[..., object]] = {
    "normal": normal_,
    "xavier_uniform": nn.init.xavier_uniform_,  # Glorot & Bengio 2010: +-sqrt(6 / (M + D))
    "zeros": nn.init.zeros_,
    "sinusoidal": sinusoidal_,
    "pretrained": pretrained_,
}
"""Initialisers of a table by name. Each fills its first argument in place."""
