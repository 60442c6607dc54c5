"""Per-layer inputs: vectors of each token for every layer, computed before block 0 (Gemma 3n and Gemma 4).

Letters: B batch, L length, D model width, V vocabulary, N layers, P width of an input of a layer.
"""

import torch
from torch import Tensor, nn

from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.modules.tokens import TokenEmbedding


class PerLayerInputs(nn.Module):
    """The inputs of all layers of a token.

    The token part is a row of a table, times sqrt(P). The combined form adds a projection of the token's vector:
    (RMSNorm(project(x) / sqrt(D)) + token part) / sqrt(2).

    Args:
        config: the sizes.
        d_model: D.
        vocab_size: V; ids beyond the rows of the table take row 0.

    """

    def __init__(self, config: PerLayerConfig, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = TokenEmbedding(config.rows, config.layers * config.width)
        self.project = nn.Linear(d_model, config.layers * config.width, bias=False)
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self._by = d_model**-0.5
        self._short = config.rows < vocab_size

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Return the token part, float32 (B, L, N, P), of int64 `input_ids` (B, L)."""
        if self._short:
            input_ids = torch.where(input_ids < self.config.rows, input_ids, 0)
        return self._split(self.tokens(input_ids) * self.config.width**0.5)

    def forward(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the combined form, float32 (B, L, N * P), of int64 `input_ids` (B, L) and their vectors (B, L, D)."""
        projected = self._split(self.project(x) * self._by)
        mean = projected.pow(2).mean(-1, keepdim=True) + self.config.eps
        normed = projected * torch.pow(mean, -0.5) * self.norm.weight
        combined: Tensor = (normed + self.look_up(input_ids)) * 2**-0.5
        return combined.flatten(-2)

    def _split(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(*vectors.shape[:-1], self.config.layers, self.config.width)
