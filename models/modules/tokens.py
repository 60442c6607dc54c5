"""The token table. Letters: B batch, L length, D model width, V vocabulary."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_


class TokenEmbedding(nn.Module):
    """One vector per token id, optionally scaled (Vaswani et al. 2017, section 3.4).

    Args:
        vocab_size: rows V.
        d_model: width D.
        scale: factor on every vector; True for sqrt(D), False for 1; default 1.
        padding_idx: id of padding; its row starts at zero and gets no gradient; default none.
        freeze: keep the table out of training; default False.
        init: initial values, a name of `INITIALISERS`, or pretrained values (V, D), padding row included; default
            "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `init` is not known or not of shape (V, D), `padding_idx` is outside 0 to V - 1, or `std` is not
            above 0.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        scale: float | bool = 1.0,
        padding_idx: int | None = None,
        freeze: bool = False,
        init: Initialiser | Tensor = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not 0 <= padding_idx < vocab_size:
            raise ValueError(f"padding_idx: got {padding_idx}, expected 0 to {vocab_size - 1}")
        self.scale = float(scale)
        if isinstance(scale, bool):
            self.scale = math.sqrt(d_model) if scale else 1.0
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model), requires_grad=not freeze)
        initialise_(self.weight, init, std)
        if padding_idx is not None and not isinstance(init, Tensor):
            self.weight.data[padding_idx] = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of int64 `input_ids` (B, L), in the type of the table.

        Raises:
            IndexError: an id is outside 0 to V - 1.

        """
        vectors = F.embedding(input_ids, self.weight, self.padding_idx)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def tie(self, projection: nn.Linear) -> None:
        """Make an output projection (D to V) share this table (Press & Wolf 2017).

        Raises:
            ValueError: the weight of the projection is of another shape.

        """
        if projection.weight.shape != self.weight.shape:
            raise ValueError(
                f"projection: got weight {tuple(projection.weight.shape)}, expected {tuple(self.weight.shape)}"
            )
        projection.weight = self.weight

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        rows, width = self.weight.shape
        scale = "" if self.scale == 1.0 else f", scale={self.scale:g}"
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"vocab_size={rows}, d_model={width}{scale}{padding}"
