"""Rotary positions (RoPE): an angle proportional to the position turns queries and keys.

Letters: B batch, L length, D model width, H heads, R rotary width (the rotated part of a head).
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from preblock.models.modules.derived_buffer import DerivedBuffers
from preblock.models.modules.positions import check_position_ids, positions_of
from preblock.models.modules.rotary_config import RotaryConfig, attention_factor, rotary_frequencies


class RotaryEmbedding(DerivedBuffers):
    """Cosines and sines of the angles, for `rotate` (Su et al. 2021, section 3.2.2). It has no parameters.

    The angles are float32 products of position and frequency, as published models compute them: equal to those
    models at every position, and to the formula within 1e-2 at position 10^5. An export takes their cosines and
    sines in float64 and rounds them. They differ from this module by at most one unit in the last place.

    Args:
        config: width, base and scaling of the angles: `RotaryConfig(dim=64)`.

    """

    frequencies: Tensor

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__(frequencies=partial(rotary_frequencies, config))
        self.config = config
        self.attention_factor = attention_factor(config)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the position of every token of `x`.

        Args:
            x: (B, L, D) vectors, for a result of their floating-point type, or (B, L) ids, for float32.
            position_ids: int64 (1 or B, L); need not be consecutive. Excludes `offset`.
            offset: tokens already fed: an int, or int64 of shape (1,) or (B,); default 0.

        Returns:
            cos and sin, each (1 or B, L, R): the values of the R/2 pairs, twice over.

        Raises:
            ValueError: a position is negative, or is not less than the `length` of the config.

        """
        # The exporter cannot follow a check on values; the service makes it before the graph runs.
        if not torch.compiler.is_exporting():
            check_position_ids(x, position_ids, offset)
        positions = positions_of(x, position_ids, offset)
        if self.config.length and not torch.compiler.is_exporting() and positions.numel():
            highest = int(positions.max())
            if highest >= self.config.length:
                raise ValueError(f"position: got {highest}, expected 0 to {self.config.length - 1}")
        angle = positions.unsqueeze(-1).to(self.frequencies.dtype) * self.frequencies
        if torch.compiler.is_exporting():
            # The last bit of onnxruntime's float32 cosine depends on the place of an angle in the tensor.
            angle = angle.to(torch.float64)
        cos, sin = (part.to(torch.float32) * self.attention_factor for part in (angle.cos(), angle.sin()))
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((sin, sin), dim=-1).to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"dim={self.config.dim}, theta={self.config.theta:g}, scaling={self.config.scaling!r}"


def rotate(query_or_key: Tensor, cos: Tensor, sin: Tensor, layout: Literal["half", "interleaved"] = "half") -> Tensor:
    """Turn each pair of the first R columns of every head by the angle of its position; the others stay.

    Args:
        query_or_key: (B, H, L, width of a head).
        cos: (1 or B, L, R), from `RotaryEmbedding`.
        sin: sines, in the same shape.
        layout: pairs of columns: "half" column j and j + R/2 (llama, gpt-neox), "interleaved" 2j and 2j + 1
            (gpt-j; Su et al. 2021, equation 34).

    Returns:
        The turned vectors, in the shape of `query_or_key`.

    Raises:
        ValueError: the layout is not known, or R exceeds the width of a head.

    """
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout: got {layout!r}, expected 'half', 'interleaved'")
    dim = cos.shape[-1]
    if dim > query_or_key.shape[-1]:
        raise ValueError(f"cos: got {dim} columns, expected up to the width {query_or_key.shape[-1]} of a head")
    turned, rest = query_or_key[..., :dim], query_or_key[..., dim:]
    cos, sin = cos[..., : dim // 2].unsqueeze(1), sin[..., : dim // 2].unsqueeze(1)
    if layout == "half":
        a, b = turned[..., : dim // 2], turned[..., dim // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
