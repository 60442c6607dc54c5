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
"""Names of the `INITIALISERS`."""


def initialise_(table: Tensor, init: Initialiser | Tensor, std: float) -> None:
    """Fill `table` as `init` says; a table on the device "meta" has no values to fill.

    Args:
        table: float (rows, D).
        init: a name of `INITIALISERS`, or pretrained values of the shape of `table`.
        std: standard deviation of `init="normal"`.

    Raises:
        ValueError: `init` is not known or of another shape, `std` is not above 0, or D is odd for "sinusoidal".

    """
    if isinstance(init, Tensor):
        if init.shape != table.shape:
            raise ValueError(f"pretrained: got shape {tuple(init.shape)}, expected {tuple(table.shape)}")
        with torch.no_grad():
            table.copy_(init)
        return
    if init not in INITIALISERS:
        raise ValueError(f"init: got {init!r}, expected {', '.join(INITIALISERS)}, or a tensor of pretrained values")
    if not 0 < std < math.inf:
        raise ValueError(f"std: got {std!r}, expected a number above 0")
    if table.is_meta:  # torch would import its compiler for it, in more than two seconds
        return
    INITIALISERS[init](table, std)


def _fill_sinusoids(table: Tensor, _: float) -> None:
    """Fill `table` (M, D) with the sinusoids of the positions 0 to M - 1, as a trainable warm start."""
    with torch.no_grad():
        table.copy_(sinusoid(torch.arange(table.shape[0], device=table.device), table.shape[1]))


INITIALISERS: dict[str, Callable[[Tensor, float], object]] = {
    "normal": lambda table, std: nn.init.normal_(table, std=std),
    "xavier_uniform": lambda table, _: nn.init.xavier_uniform_(table),  # Glorot & Bengio 2010: +-sqrt(6 / (M + D))
    "zeros": lambda table, _: nn.init.zeros_(table),
    "sinusoidal": _fill_sinusoids,
}
"""Initialisers by name. Each fills a table in place, given the standard deviation."""
