"""The token table. Letters: B batch, L length, D model width, V vocabulary."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.initialisers import normal_


class TokenTable(nn.Module):
    """One vector per token id, optionally scaled.

    Args:
        vocab_size: rows V.
        d_model: width D.
        scale: factor on every vector; True for sqrt(D) (Vaswani et al. 2017, section 3.4), False for 1; default 1.
        padding_idx: id whose row starts at zero and gets no gradient; default none.
        pretrained: float (V, D) to start from, taken as it is, the padding row included.
        freeze: keep the table out of training; default False.

    Raises:
        ValueError: `pretrained` is of another shape than (V, D), or `padding_idx` lies outside 0 to V - 1.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        scale: float | bool = 1.0,
        padding_idx: int | None = None,
        pretrained: Tensor | None = None,
        freeze: bool = False,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not 0 <= padding_idx < vocab_size:
            raise ValueError(f"padding_idx: got {padding_idx}, allowed 0 to {vocab_size - 1}")
        if pretrained is not None and pretrained.shape != (vocab_size, d_model):
            raise ValueError(f"pretrained: got shape {tuple(pretrained.shape)}, allowed ({vocab_size}, {d_model})")
        self.scale = float(scale)
        if isinstance(scale, bool):
            self.scale = math.sqrt(d_model) if scale else 1.0
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model), requires_grad=not freeze)
        if pretrained is not None:
            self.weight.data.copy_(pretrained)
            return
        normal_(self.weight)
        if padding_idx is not None:
            self.weight.data[padding_idx] = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of int64 `input_ids` (B, L)."""
        vectors = F.embedding(input_ids, self.weight, self.padding_idx)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def tie(self, projection: nn.Linear) -> None:
        """Make an output projection (D to V) use this very table (Press & Wolf 2017).

        Raises:
            ValueError: its weight is of another shape.

        """
        if projection.weight.shape != self.weight.shape:
            raise ValueError(
                f"projection: got weight {tuple(projection.weight.shape)}, allowed {tuple(self.weight.shape)}"
            )
        projection.weight = self.weight
