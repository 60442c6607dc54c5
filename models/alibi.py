"""ALiBi: attention scores fall in proportion to the distance. Letters: H heads, Q query length, K key length."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from incipit.models.relative import relative_positions


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes m of `heads` heads: float32 (H,) (Press et al. 2022, section 3).

    For a power of two n they are 2^(-8/n), 2^(-16/n), ..., 2^-8. Other counts take those of the next lower power of
    two, then every other one of the next higher, as the paper's code does. Computed in float64 and rounded once.

    Raises:
        ValueError: there is no head.

    """
    if heads < 1:
        raise ValueError(f"heads: got {heads}, allowed 1 or more")
    lower = 2 ** (heads.bit_length() - 1)
    exponents = [*_exponents(lower), *_exponents(2 * lower)[::2]][:heads]
    # A real tensor also where the parameters are built without storage: it is derived, and never loaded.
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32, device="cpu")


def _exponents(heads: int) -> list[float]:
    return [-8 * i / heads for i in range(1, heads + 1)]


class AlibiBias(nn.Module):
    """A bias -m * distance on the attention scores, with a fixed slope m per head (Press et al. 2022, section 3).

    The distance is query position less key position: the bias is 0 at the query's own position and falls towards
    the past. Keys after the query get positive numbers: a causal mask has to take them away.

    Published models add one row for all queries, which differs from these by a constant per head and query, so that
    softmax gives the same weights:

    - bloom adds m * (key position): the row of a query at position 0. Its key positions are cumsum(mask) - 1, and 0
      for padding: a distance there counts real tokens alone.
    - mpt adds m * (key position - (K - 1)): the row of a query at the last key.
    - falcon adds the row of bloom, with m and the product rounded to bfloat16, before the scores are divided by
      sqrt(width of a head): there the bias is to be divided by it too.

    Args:
        heads: H; any count.

    Raises:
        ValueError: there is no head.

    """

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, query_offset: int, query_length: int, key_length: int) -> Tensor:
        """Return the bias: float32 (H, Q, K), whatever the module's type, to be added before any rounding.

        Args:
            query_offset: position of the first query: the number of keys that were fed before it.
            query_length: Q.
            key_length: K; keys stand at positions 0 to K - 1.

        Raises:
            ValueError: an argument is negative.

        """
        relative = relative_positions(query_offset, query_length, key_length, self.slopes.device)
        return self.slopes.reshape(-1, 1, 1) * relative

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Only the device is followed: rounded to bfloat16, a slope is wrong by 0.4 % of every distance.
        self.slopes = alibi_slopes(self.heads).to(self.slopes.device)
        return self
