"""Positions in two dimensions, for the patches of an image: a grid of H rows and W columns, listed row by row.

Letters: B batch, L patches, D model width, H rows, W columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding, check_levels, check_shape
from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_
from preblock.models.modules.positions import SinusoidalPositionalEncoding, join
from preblock.models.modules.tokens import TokenEmbedding
from preblock.models.sinusoid_tables import check_grid_width


def grid_ids(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return the row and the column of every patch of a grid, row by row: int64 (1, height * width, 2)."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return torch.cartesian_prod(rows, columns).unsqueeze(0)


def _ids_of(x: Tensor, position_ids: Tensor | None, height: int, width: int) -> Tensor:
    """Return `position_ids`, by default the ids of the whole grid."""
    if position_ids is not None:
        return position_ids
    if x.shape[1] != height * width:
        raise ValueError(
            f"x: got {x.shape[1]} patches, expected {height * width} (a grid of {height} x {width}); "
            "position_ids place those of another grid"
        )
    return grid_ids(height, width, x.device)


class SinusoidalGridEncoding(nn.Module):
    """The sinusoid of the row and the sinusoid of the column side by side (Parmar et al. 2018, Carion et al. 2020).

    Columns 0 to D/2 - 1 of a vector tell the row, D/2 to D - 1 the column.

    Args:
        d_model: width D of a vector; a multiple of 4.
        height: H, rows of the grid used by `forward` without `position_ids`.
        width: W, columns of that grid. Positions beyond it are computed on demand, except in an export, where the
            larger of H and W is the limit.
        dropout: probability, applied after the sum; default 0.1.
        base: 10000 in the papers.

    Raises:
        ValueError: D is no multiple of 4.

    """

    def __init__(self, d_model: int, height: int, width: int, dropout: float = 0.1, base: float = 10000.0) -> None:
        super().__init__()
        check_grid_width(d_model)
        self.height, self.width = height, width
        self.axis = SinusoidalPositionalEncoding(d_model // 2, max(height, width), base=base)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Add the position vectors to `x`.

        Args:
            x: (B, L, D) patches, or (B, L) ids, to return only the position vectors.
            position_ids: int64 (1 or B, L, 2), row and column of each patch, in any order. `grid_ids` makes those
                of a grid of another size. Default: the whole grid, row by row, so that L is H * W.

        Returns:
            (B, L, D); for ids (1 or B, L, D).

        Raises:
            ValueError: L is not H * W, `position_ids` is of another shape, or an index is negative.

        """
        ids = _ids_of(x, position_ids, self.height, self.width)
        check_shape(x, ids, 2)
        row, column = ids.unbind(-1)
        vectors = torch.cat((self.axis(row, row), self.axis(column, column)), dim=-1)
        return join(x, vectors, self.dropout)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"height={self.height}, width={self.width}"


class LearnedGridEncoding(nn.Module):
    """One trained vector per cell, in a table of H * W rows (Dosovitskiy et al. 2021).

    Args:
        d_model: width D of a vector.
        height: H, rows of the grid.
        width: W, columns of the grid.
        dropout: probability, applied after the sum; default 0.1.
        init: initial values of the table, a name of `INITIALISERS`, or pretrained values (H * W, D); default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known or not of shape (H * W, D), or `std` is not above 0.

    """

    def __init__(
        self,
        d_model: int,
        height: int,
        width: int,
        dropout: float = 0.1,
        init: Initialiser | Tensor = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.weight = nn.Parameter(torch.empty(height * width, d_model))
        self.dropout = nn.Dropout(dropout)
        initialise_(self.weight, init, std)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Add the position vectors to `x`; arguments as in `SinusoidalGridEncoding`.

        Raises:
            ValueError: L is not H * W, `position_ids` is of another shape, or an index is outside the grid.

        """
        ids = _ids_of(x, position_ids, self.height, self.width)
        # The exporter cannot follow a check on values.
        if not torch.compiler.is_exporting():
            check_levels(x, ids, {"row": self.height, "column": self.width})
        row, column = ids.unbind(-1)
        return join(x, F.embedding(row * self.width + column, self.weight), self.dropout)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"height={self.height}, width={self.width}, d_model={self.weight.shape[1]}"


class FactorisedGridEncoding(nn.Module):
    """One trained vector per row and one per column, added (Lee et al. 2023, Dehghani et al. 2023).

    It has (H + W) * D parameters instead of H * W * D. Training a row and a column trains every cell that they share.

    Args:
        d_model: width D of a vector.
        height: H, rows of the grid.
        width: W, columns of the grid.
        dropout: probability, applied after the sum; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known, or `std` is not above 0.

    """

    def __init__(
        self,
        d_model: int,
        height: int,
        width: int,
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.axes = HierarchicalPositionalEncoding(d_model, {"row": height, "column": width}, dropout, init, std)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Add the position vectors to `x`; arguments as in `SinusoidalGridEncoding`.

        Raises:
            ValueError: L is not H * W, `position_ids` is of another shape, or an index is outside the grid.

        """
        joined: Tensor = self.axes(x, _ids_of(x, position_ids, self.height, self.width))
        return joined

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"height={self.height}, width={self.width}"


class FactorisedCells(nn.Module):
    """The vectors of `FactorisedGridEncoding` for a sequence of tokens: position p is the cell p of the grid.

    Args:
        d_model: width D of a vector.
        height: H, rows of the grid.
        width: W, columns of the grid.
        init: initial values of the tables, a name of `INITIALISERS`.
        std: standard deviation of `init="normal"`.

    Raises:
        ValueError: `init` is not known, or `std` is not above 0.

    """

    def __init__(self, d_model: int, height: int, width: int, init: Initialiser, std: float) -> None:
        super().__init__()
        self.width = width
        self.rows = TokenEmbedding(height, d_model, init=init, std=std)
        self.columns = TokenEmbedding(width, d_model, init=init, std=std)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Add to `x` (B, L, D) the vectors of the cells `position_ids`, int64 (1 or B, L), 0 to H * W - 1."""
        vectors: Tensor = self.rows(position_ids // self.width) + self.columns(position_ids % self.width)
        return x + vectors
