"""ALiBi: attention scores fall in proportion to the distance. Letters: H heads, Q query length, K key length."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from preblock.models.modules.bias import AlibiConfig, alibi_slopes
from preblock.models.modules.derived_buffer import DerivedBuffers
from preblock.models.modules.relative_positions import check_lengths, relative_positions


class AlibiBias(DerivedBuffers):
    """A bias -m * distance on the attention scores, with a fixed slope m per head (Press et al. 2022, section 3).

    The distance is query position less key position: the bias is 0 at the query's own position and falls towards
    the past. Keys after the query get positive numbers: a causal mask must remove them.

    Published models measure distances from one key, the first or the last, in place of the query's own position.
    This adds a constant per head and query, so softmax gives the same weights:

    - bloom: anchor "first", recipe "float32_powers". Its key positions are cumsum(mask) - 1, and 0 for padding, so
      a distance counts real tokens alone.
    - mpt: anchor "last", recipe "float32_reciprocals".
    - falcon: as bloom, in bfloat16. It is added before the scores are divided by sqrt(width of a head), so `divisor` is
      that number.

    Args:
        heads: H; any count.
        anchor: origin of distances: the "query", the "first" key, or the "last" key; default the query, as in the
            paper.
        recipe: a key of `preblock.models.modules.bias.SLOPES`; default "exact".
        arithmetic: "bfloat16" rounds slopes, distances and their product to it; default "float32".
        divisor: divisor of the product; default 1.

    Raises:
        ValueError: `heads` is below 1, or another argument is not allowed.

    """

    slopes: Tensor

    def __init__(
        self,
        heads: int,
        anchor: Literal["query", "first", "last"] = "query",
        recipe: str = "exact",
        arithmetic: Literal["float32", "bfloat16"] = "float32",
        divisor: float = 1.0,
    ) -> None:
        config = AlibiConfig(heads=heads, anchor=anchor, recipe=recipe, arithmetic=arithmetic, divisor=divisor)
        super().__init__(slopes=partial(alibi_slopes, config))
        self.heads, self.anchor, self.recipe = heads, anchor, recipe
        self.arithmetic, self.divisor = arithmetic, divisor

    def forward(self, query_offset: int, query_length: int, key_length: int) -> Tensor:
        """Return the bias: float32 (1, H, Q, K) for a module of any type, to be added before any rounding.

        Args:
            query_offset: position of the first query: number of keys fed before it.
            query_length: Q.
            key_length: K; keys have positions 0 to K - 1.

        Raises:
            ValueError: an argument is negative.

        """
        check_lengths(query_offset=query_offset, query_length=query_length, key_length=key_length)
        if self.anchor == "query":
            relative = relative_positions(query_offset, query_length, key_length, self.slopes.device)
        else:
            keys = torch.arange(key_length, device=self.slopes.device)
            relative = (keys - (key_length - 1 if self.anchor == "last" else 0)).expand(query_length, -1)
        bias = self._rounded(self._rounded(relative.to(torch.float32)) * self.slopes.reshape(1, -1, 1, 1))
        return bias if self.divisor == 1 else bias / self.divisor

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"heads={self.heads}, anchor={self.anchor!r}"

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.arithmetic == "float32" else x.to(torch.bfloat16).to(torch.float32)
