"""Position modules: learned and sinusoidal, with the same constructor and `forward`.

Letters: B batch, L length, D model width, M maximum length.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.models.modules.derived_buffer import DerivedBuffers
from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_
from preblock.models.modules.sinusoids import Sinusoid


def positions_of(x: Tensor, position_ids: Tensor | None, offset: int | Tensor) -> Tensor:
    """Return the position of every token of `x`: int64 (1 or B, L).

    Without `position_ids` they run from `offset` on; an `offset` of shape (1,) or (B,) is per row.
    """
    if position_ids is not None:
        return position_ids
    start = torch.as_tensor(offset, dtype=torch.int64, device=x.device).reshape(-1, 1)
    return torch.arange(x.shape[1], device=x.device) + start


def check_position_ids(x: Tensor, position_ids: Tensor | None, offset: int | Tensor) -> None:
    """Raise ValueError if `position_ids` is of another shape than (1 or B, L), negative, or joined by an `offset`.

    Without them, if `offset` is negative or of another shape than (1,) or (B,). Both must be whole numbers.
    """
    batch, length = x.shape[:2]
    for name, given in (("offset", offset), ("position_ids", position_ids)):
        dtype = torch.as_tensor(0 if given is None else given).dtype
        if dtype.is_floating_point:
            raise ValueError(f"{name}: got {dtype}, expected whole numbers")
    if position_ids is None:
        start = torch.as_tensor(offset)
        if start.ndim and start.shape not in ((1,), (batch,)):
            raise ValueError(f"offset: got shape {tuple(start.shape)}, expected (1,) or ({batch},)")
        if start.numel() and int(start.min()) < 0:
            raise ValueError(f"offset: got {int(start.min())}, expected 0 or more")
        return
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids: got shape {tuple(position_ids.shape)}, expected (1, {length}) or ({batch}, {length})"
        )
    if isinstance(offset, Tensor) or offset != 0:
        raise ValueError("position_ids and offset exclude each other: position_ids say every position already")
    if position_ids.numel() and int(position_ids.min()) < 0:
        raise ValueError(f"position_ids: got {int(position_ids.min())}, expected 0 or more")


def join(x: Tensor, vectors: Tensor, dropout: nn.Dropout) -> Tensor:
    """Add (1 or B, L, D) vectors to `x` (B, L, D), with dropout; for ids `x` (B, L) return the vectors alone."""
    if x.ndim == 2:
        return vectors
    joined: Tensor = dropout(x + vectors)
    return joined


class LearnedPositionalEncoding(nn.Module):
    """One trained vector per position, in a table of M rows (Gehring et al. 2017; Devlin et al. 2018).

    Args:
        d_model: width D of a vector.
        max_len: rows M of the table; the largest legal `offset + length`.
        dropout: probability, applied after the sum; default 0.1.
        init: initial values of the table, a name of `INITIALISERS`, or pretrained values of the shape of the table;
            default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known or not of shape (M, D), or `std` is not above 0.

    """

    def __init__(
        self,
        d_model: int,
        max_len: int,
        dropout: float = 0.1,
        init: Initialiser | Tensor = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, d_model))
        self.dropout = nn.Dropout(dropout)
        initialise_(self.weight, init, std)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        """Add the position vectors to `x`.

        Args:
            x: (B, L, D) vectors, or (B, L) ids, to return only the position vectors.
            position_ids: int64 (1 or B, L); need not be consecutive. Excludes `offset`.
            offset: tokens already fed: an int, or int64 of shape (1,) or (B,); default 0.

        Returns:
            (B, L, D); for ids (1 or B, L, D).

        Raises:
            ValueError: a position is outside 0 to M - 1. Exactly M tokens are legal. Positions never wrap or clamp.

        """
        # The exporter cannot follow a check on values; the service makes it before the graph runs.
        if not torch.compiler.is_exporting():
            self._check(x, position_ids, offset)
        return join(x, F.embedding(positions_of(x, position_ids, offset), self.weight), self.dropout)

    def _check(self, x: Tensor, position_ids: Tensor | None, offset: int | Tensor) -> None:
        check_position_ids(x, position_ids, offset)
        if position_ids is not None:
            if position_ids.numel() and int(position_ids.max()) >= self.max_len:
                raise ValueError(f"position_ids: got {int(position_ids.max())}, expected 0 to {self.max_len - 1}")
            return
        start, length = torch.as_tensor(offset), x.shape[1]
        highest = int(start.max()) if start.numel() else 0
        if highest + length > self.max_len:
            raise ValueError(
                f"length {length} + offset {highest} = {highest + length} exceeds the maximum length {self.max_len}"
            )

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"max_len={self.max_len}, d_model={self.weight.shape[1]}"


class SinusoidalPositionalEncoding(DerivedBuffers):
    """Fixed sinusoids of the position, without parameters (Vaswani et al. 2017, section 3.5).

    Args:
        d_model: width D of a vector; even, unless `pad_odd`.
        max_len: rows of the precomputed table. Positions beyond it are computed on demand, except in an export,
            where the table is the limit; 0 for no table, so that an export computes every position too.
        dropout: probability, applied after the sum; default 0.1.
        base: 10000 in the paper.
        pad_odd: for an odd width, fill the last column with zeros; default False.

    Raises:
        ValueError: D is odd and `pad_odd` is False.

    """

    follows_type = True
    table: Tensor

    def __init__(
        self,
        d_model: int,
        max_len: int,
        dropout: float = 0.1,
        base: float = 10000.0,
        pad_odd: bool = False,
    ) -> None:
        sinusoid = Sinusoid(d_model, base, pad_odd)
        super().__init__(table=partial(_tabulate, sinusoid, max_len))
        self.max_len, self.sinusoid = max_len, sinusoid
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        """Add the position vectors to `x`; shapes and arguments as in `LearnedPositionalEncoding`, without its limit.

        Raises:
            ValueError: a position is negative.

        """
        if not torch.compiler.is_exporting():
            check_position_ids(x, position_ids, offset)
        positions = positions_of(x, position_ids, offset)
        if torch.compiler.is_exporting():
            computed = self.max_len == 0
        else:
            computed = positions.numel() > 0 and int(positions.max()) >= self.max_len
        vectors = self.sinusoid(positions).to(self.table.dtype) if computed else F.embedding(positions, self.table)
        return join(x, vectors, self.dropout)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"max_len={self.max_len}, d_model={self.sinusoid.d_model}"


def _tabulate(sinusoid: Sinusoid, rows: int) -> NDArray[np.float32]:
    """Return the sinusoids of the positions 0 to `rows` - 1, computed in chunks, to bound the working memory."""
    parts = torch.split(torch.arange(rows, device="cpu"), 1024)
    table: NDArray[np.float32] = torch.cat([sinusoid(part) for part in parts]).numpy()
    return table


class FixedPositionalEncoding(DerivedBuffers):
    """A derived table of positions, as in published models: a buffer, neither trained nor saved.

    Args:
        derive: returns the table, float32 (M, D).

    """

    follows_type = True
    table: Tensor

    def __init__(self, derive: Callable[[], NDArray[np.float32]]) -> None:
        super().__init__(table=derive)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Add to `x` (B, L, D) the rows `position_ids`, int64 (1 or B, L).

        Raises:
            IndexError: a position is outside 0 to M - 1.

        """
        return x + F.embedding(position_ids, self.table)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"max_len={self.table.shape[0]}, d_model={self.table.shape[1]}"
