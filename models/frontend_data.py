"""A front-end as data: its config, and its tensors as NumPy arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.models.config import FrontEndConfig
from preblock.models.modules.bias import T5Config
from preblock.models.modules.rotary_config import rotary_frequencies
from preblock.models.modules.signature import Signature
from preblock.models.sinusoid_tables import RECIPES, check_grid_width, check_recipe
from preblock.models.steps import Positions, names_of, parameters

Array = NDArray[Any]
STORED = ("learned", "hybrid", "factorised")
"""Position tables with trained weights; all others are derived."""


@dataclass(frozen=True)
class FrontEndData:
    """A front-end without PyTorch.

    Args:
        config: the steps and further outputs, with all sizes.
        tensors: the trained weights, named as in `FrontEnd.state_dict()`: float32 of any shape, or a token table in
            its stored type, mapped from a file. Types beyond NumPy's, such as bfloat16, are those of ml_dtypes.

    """

    config: FrontEndConfig
    tensors: Mapping[str, Array]

    @property
    def signature(self) -> Signature:
        """The inputs, sizes and promises of its graph."""
        return self.config.signature

    def check(self) -> "FrontEndData":
        """Return this front-end.

        Raises:
            ValueError: a tensor is missing, of another shape, or not of this front-end; or a table cannot be derived.

        """
        for step, width in zip(self.config.steps, (0, *self.config.widths), strict=False):
            if isinstance(step, Positions):
                _check_derived(step, width)
        for output in self.config.rotary:
            frequencies = rotary_frequencies(output.config)
            if not np.isfinite(frequencies).all():
                got = frequencies[~np.isfinite(frequencies)][0]
                raise ValueError(f"rotary: got the frequency {got} by its settings, expected finite numbers")
        padding, rows = self.config.padding_idx, self.config.tokens.rows
        if padding is not None and not 0 <= padding < rows:
            raise ValueError(f"padding_idx: got {padding}, expected 0 to {rows - 1}")
        shapes = shapes_of(self.config)
        for name in (*shapes, *self.tensors):
            if name not in shapes or name not in self.tensors:
                got, expected = ("a tensor", "none") if name in self.tensors else ("none", "a tensor")
                raise ValueError(f"{name}: got {got}, expected {expected}")
            if (shape := self.tensors[name].shape) != shapes[name]:
                raise ValueError(f"{name}: got the shape {list(shape)}, expected {list(shapes[name])}")
        return self


def shapes_of(config: FrontEndConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained weight, by its name in `FrontEnd.state_dict()`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, step, width in zip(names_of(config.steps), config.steps, (0, *config.widths), strict=False):
        if not isinstance(step, Positions) or step.table in STORED:
            shapes |= {f"{name}.{own}": parameter.shape for own, parameter in parameters(step, width).items()}
    if isinstance(config.bias, T5Config):
        shapes["bias.weight"] = (config.bias.buckets, config.bias.heads)
    if (layers := config.per_layer) is not None:
        width = layers.layers * layers.width
        shapes["per_layer.tokens.weight"] = (layers.rows, width)
        shapes["per_layer.project.weight"] = (width, config.widths[config.lookup - 1])
        shapes["per_layer.norm.weight"] = (layers.width,)
    if (ngrams := config.ngrams) is not None and not ngrams.referenced:
        width = ngrams.width // ngrams.heads_of_layer
        shapes |= {f"ngrams.tables.{place}.weight": (rows, width) for place, rows in enumerate(ngrams.table_rows)}
    return shapes


def _check_derived(step: Positions, width: int) -> None:
    """Raise ValueError unless the table of `step`, if it is derived, exists for vectors of `width`."""
    if step.grid and step.table == "exact":
        check_grid_width(width)
    elif step.table in ("exact", "hybrid"):
        if width % 2:
            raise ValueError(f"d_model: got {width}, expected an even width, since sines and cosines come in pairs")
    elif step.table in RECIPES:
        check_recipe(step.table, step.rows, width, step.zero_row)
