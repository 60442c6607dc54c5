"""Hybrid positions: learned up to the length seen in training, sinusoidal beyond.

Letters: B batch, L length, D model width, M rows of the learned table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_
from preblock.models.modules.positions import check_position_ids, join, positions_of
from preblock.models.modules.sinusoids import Sinusoid


class HybridPositionalEncoding(nn.Module):
    """One trained vector per position below M, and the sinusoid of the position from M on.

    The parts follow Gehring et al. 2017 and Vaswani et al. 2017. Trained values near normal(0, 0.02) meet
    sinusoids of amplitude 1 at M; `init="sinusoidal"` starts without that step.

    Args:
        d_model: width D of a vector; even, unless `pad_odd`.
        max_len: rows M of the learned table. It is no limit: any position works, also in an export.
        dropout: probability, applied after the sum; default 0.1.
        base: base of the sinusoids; 10000 in the paper.
        pad_odd: for an odd width, fill the last column of the sinusoids with zeros; default False.
        init: initial values of the learned table, a name of `INITIALISERS`, or pretrained values (M, D);
            default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: D is odd and `pad_odd` is False; M is less than 1; `init` is unknown or not of shape (M, D); or
            `std` is not above 0.

    """

    def __init__(
        self,
        d_model: int,
        max_len: int,
        dropout: float = 0.1,
        base: float = 10000.0,
        pad_odd: bool = False,
        init: Initialiser | Tensor = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        if max_len < 1:
            raise ValueError(f"max_len: got {max_len}, expected 1 or more; without a learned table use sinusoids alone")
        self.max_len = max_len
        self.sinusoid = Sinusoid(d_model, base, pad_odd)
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
            ValueError: a position is negative.

        """
        positions = positions_of(x, position_ids, offset)
        # The exporter cannot follow a choice by value: its graph holds both parts.
        if not torch.compiler.is_exporting():
            check_position_ids(x, position_ids, offset)
            if not positions.numel() or int(positions.max()) < self.max_len:
                return join(x, F.embedding(positions, self.weight), self.dropout)
        # Both parts are computed for every token, and one of them is selected.
        learned = F.embedding(positions.clamp(max=self.max_len - 1), self.weight)
        beyond = self.sinusoid(positions).to(self.weight.dtype)
        vectors = torch.where((positions < self.max_len).unsqueeze(-1), learned, beyond)
        return join(x, vectors, self.dropout)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"max_len={self.max_len}, d_model={self.weight.shape[1]}"
