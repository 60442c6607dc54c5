"""Normalisation by the root mean square. Letters: B batch, L length, D model width."""

import torch
from torch import Tensor, nn


class RootMeanSquareNorm(nn.Module):
    """Divides each vector by the root of the mean of its squares (Zhang and Sennrich 2019, equation 4).

    Args:
        d_model: D.
        eps: added to the mean of the squares; default 1e-6.
        weighted: multiply by a trained weight (D,), one at first; default True.

    """

    weight: nn.Parameter | None

    def __init__(self, d_model: int, eps: float = 1e-6, weighted: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.register_parameter("weight", nn.Parameter(torch.ones(d_model)) if weighted else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, L, D), normalised in its own type."""
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return normed if self.weight is None else normed * self.weight

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        width = "" if self.weight is None else f"{len(self.weight)}, "
        return f"{width}eps={self.eps}"
