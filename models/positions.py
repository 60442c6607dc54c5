"""Position modules: learned and sinusoidal, with one constructor and one `forward`, so that they exchange freely.

Letters: B batch, L length, D model width, M maximum length.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incipit.models.initialisers import normal_


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

    Without them, if `offset` is negative or of another shape than (1,) or (B,).
    """
    batch, length = x.shape[:2]
    if position_ids is None:
        start = torch.as_tensor(offset)
        if start.ndim and start.shape not in ((1,), (batch,)):
            raise ValueError(f"offset: got shape {tuple(start.shape)}, allowed (1,) or ({batch},)")
        if start.numel() and int(start.min()) < 0:
            raise ValueError(f"offset: got {int(start.min())}, allowed 0 or more")
        return
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids: got shape {tuple(position_ids.shape)}, allowed (1, {length}) or ({batch}, {length})"
        )
    if isinstance(offset, Tensor) or offset != 0:
        raise ValueError("position_ids and offset exclude each other: position_ids say every position already")
    if position_ids.numel() and int(position_ids.min()) < 0:
        raise ValueError(f"position_ids: got {int(position_ids.min())}, allowed 0 or more")


def join(x: Tensor, vectors: Tensor, dropout: nn.Dropout) -> Tensor:
    """Add (1 or B, L, D) vectors to `x` (B, L, D), with dropout; for ids `x` (B, L) return the vectors alone."""
    if x.ndim == 2:
        return vectors
    joined: Tensor = dropout(x + vectors)
    return joined


class LearnedPositions(nn.Module):
    """One trained vector per position, in a table of M rows (Gehring et al. 2017; Devlin et al. 2018).

    Args:
        d_model: width D of a vector.
        max_len: rows M of the table; the largest legal `offset + length`.
        dropout: probability, applied after the sum; default 0.1.

    """

    def __init__(self, d_model: int, max_len: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.max_len = max_len
        self.weight = nn.Parameter(torch.empty(max_len, d_model))
        self.dropout = nn.Dropout(dropout)
        normal_(self.weight)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        """Add the position vectors to `x`.

        Args:
            x: (B, L, D) vectors, or (B, L) ids, for which the position vectors alone are returned.
            position_ids: int64 (1 or B, L); need not be consecutive. Excludes `offset`.
            offset: tokens already fed: an int, or int64 of shape (1,) or (B,); default 0.

        Returns:
            (B, L, D); for ids (1 or B, L, D).

        Raises:
            ValueError: a position lies outside 0 to M - 1. Exactly M tokens are legal. Nothing wraps, nothing clamps.

        """
        # The exporter cannot follow a check on values; the service makes it before the graph runs.
        if not torch.compiler.is_compiling():
            self._check(x, position_ids, offset)
        return join(x, F.embedding(positions_of(x, position_ids, offset), self.weight), self.dropout)

    def _check(self, x: Tensor, position_ids: Tensor | None, offset: int | Tensor) -> None:
        check_position_ids(x, position_ids, offset)
        if position_ids is not None:
            if position_ids.numel() and int(position_ids.max()) >= self.max_len:
                raise ValueError(f"position_ids: got {int(position_ids.max())}, allowed 0 to {self.max_len - 1}")
            return
        start, length = torch.as_tensor(offset), x.shape[1]
        highest = int(start.max()) if start.numel() else 0
        if highest + length > self.max_len:
            raise ValueError(
                f"length {length} + offset {highest} = {highest + length} exceeds the maximum length {self.max_len}"
            )


def sinusoid(positions: Tensor, d_model: int, base: float = 10000.0, pad_odd: bool = False) -> Tensor:
    """Return the sinusoids of int64 `positions` (...) as float32 (..., D) (Vaswani et al. 2017, section 3.5).

    PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(same). Computed in float64 and rounded once: a float32
    product of position and frequency is wrong by 4e-2 at position 10^6.

    Raises:
        ValueError: D is odd, unless `pad_odd` asks for a last column of zeros.

    """
    if d_model % 2 and not pad_odd:
        raise ValueError(
            f"d_model: got {d_model}, allowed an even width, since sines and cosines come in pairs; "
            "pad_odd=True fills the last column with zeros"
        )
    exponent = torch.arange(0, d_model - 1, 2, dtype=torch.float64, device=positions.device) / d_model
    wavelength = torch.pow(torch.tensor(base, dtype=torch.float64, device=positions.device), exponent)
    angle = positions.to(torch.float64).unsqueeze(-1) / wavelength
    vectors = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2).to(torch.float32)
    return F.pad(vectors, (0, d_model % 2))


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids of the position, without parameters (Vaswani et al. 2017, section 3.5).

    Args:
        d_model: width D of a vector; even, unless `pad_odd`.
        max_len: rows of the precomputed table. Positions beyond it are computed on demand, except in an export,
            where the table is the limit.
        dropout: probability, applied after the sum; default 0.1.
        base: 10000 in the paper.
        pad_odd: for an odd width, fill the last column with zeros; default False.

    Raises:
        ValueError: D is odd and `pad_odd` is False.

    """

    table: Tensor

    def __init__(
        self, d_model: int, max_len: int, dropout: float = 0.1, base: float = 10000.0, pad_odd: bool = False
    ) -> None:
        super().__init__()
        self.d_model, self.max_len, self.base, self.pad_odd = d_model, max_len, base, pad_odd
        # A real table also where the parameters are built without storage: it is derived, and never loaded.
        rows = torch.arange(max_len, device="cpu")
        self.register_buffer("table", sinusoid(rows, d_model, base, pad_odd), persistent=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        """Add the position vectors to `x`; shapes and arguments as in `LearnedPositions`, without its limit.

        Raises:
            ValueError: a position is negative.

        """
        if torch.compiler.is_compiling():
            return join(x, F.embedding(positions_of(x, position_ids, offset), self.table), self.dropout)
        check_position_ids(x, position_ids, offset)
        positions = positions_of(x, position_ids, offset)
        if positions.numel() and int(positions.max()) >= self.max_len:
            vectors = sinusoid(positions, self.d_model, self.base, self.pad_odd).to(self.table.dtype)
        else:
            vectors = F.embedding(positions, self.table)
        return join(x, vectors, self.dropout)
