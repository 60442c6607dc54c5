"""Hierarchical positions: a token has several position indices, and the vectors of all of them are added.

Letters: B batch, L length, D model width.
"""

from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_
from preblock.models.modules.positions import join


def check_shape(x: Tensor, position_ids: Tensor, levels: int) -> None:
    """Raise ValueError if `position_ids` is of another shape than (1 or B, L, levels)."""
    batch, length = x.shape[:2]
    if position_ids.shape not in ((1, length, levels), (batch, length, levels)):
        raise ValueError(
            f"position_ids: got shape {tuple(position_ids.shape)}, "
            f"expected (1, {length}, {levels}) or ({batch}, {length}, {levels})"
        )


def check_levels(x: Tensor, position_ids: Tensor, levels: Mapping[str, int]) -> None:
    """Raise ValueError if the shape is wrong, or an index is outside 0 to rows - 1 of its level."""
    check_shape(x, position_ids, len(levels))
    if not position_ids.numel():
        return
    for (level, rows), ids in zip(levels.items(), position_ids.unbind(-1), strict=True):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= rows:
            raise ValueError(f"position_ids: {level} got {lowest if lowest < 0 else highest}, expected 0 to {rows - 1}")


class HierarchicalPositionalEncoding(nn.Module):
    """One table per level, and the sum of one row of each: paragraph, sentence, word; or year, month, day, hour.

    Bai et al. 2021 (Segatron) for texts, Zhou et al. 2021 (Informer) for times.

    Args:
        d_model: width D of a vector.
        levels: name of each level -> rows of its table, in the order of the last axis of `position_ids`. Indices
            start at 0: months 1 to 12 are the indices 0 to 11 of a level of 12 rows.
        dropout: probability, applied after the sum; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `levels` is empty, `init` is unknown, or `std` is not above 0.

    """

    def __init__(
        self,
        d_model: int,
        levels: Mapping[str, int],
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("levels: got none, expected one or more")
        self.levels = dict(levels)
        self.tables = nn.ParameterDict()
        # One by one: handed a dict at once, ParameterDict sorts it by name.
        for level, rows in levels.items():
            table = torch.empty(rows, d_model)
            initialise_(table, init, std)
            self.tables[level] = nn.Parameter(table)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Add the position vectors to `x`; those of the levels are added first, in their order.

        Args:
            x: (B, L, D) vectors, or (B, L) ids, to return only the position vectors.
            position_ids: int64 (1 or B, L, levels).

        Returns:
            (B, L, D); for ids (1 or B, L, D).

        Raises:
            ValueError: `position_ids` is of another shape, or an index is outside its level.

        """
        # The exporter cannot follow a check on values.
        if not torch.compiler.is_exporting():
            check_levels(x, position_ids, self.levels)
        indices = zip(self.levels, position_ids.unbind(-1), strict=True)
        vectors = reduce(torch.add, [F.embedding(ids, self.tables[level]) for level, ids in indices])
        return join(x, vectors, self.dropout)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"levels={self.levels}"
