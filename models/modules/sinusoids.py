"""Exact sinusoids of any position, computed in PyTorch.

Letters: D width of a vector, `...` any shape of positions.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.sinusoid_tables import COSINE, POSITIONS, SINE, polynomial, turns_per_position


class Sinusoid(nn.Module):
    """Sinusoids of a position, computed, exact but for one rounding to float32 (Vaswani et al. 2017, section 3.5).

    PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(same). Beside the half unit of the rounding to float32, the
    error is below a thousandth of a unit in the last place, at every position. An angle in float64 is not enough: close
    to the zeros of sine and cosine it is wrong by a thousand units and more.

    The angle is counted in turns, and whole turns are dropped (Cody and Waite 1980). Turns per position are known to
    2^-120, in four parts. The module computes only sums, products and roundings to integers; IEEE 754 defines each of
    them to the bit. A graph, another device and another shape therefore give the same bits. The sines of libraries
    guarantee no such result.

    The module has no parameters, and no buffers, because `Module.to` would round them. It always returns float32.

    Args:
        d_model: width D of a vector; even, unless `pad_odd`.
        base: 10000 in the paper; greater than 0.
        pad_odd: for an odd width, fill the last column with zeros; default False.

    Raises:
        ValueError: D is less than 1, or odd and `pad_odd` is False; or `base` is not finite and greater than 0.

    """

    def __init__(self, d_model: int, base: float = 10000.0, pad_odd: bool = False) -> None:
        super().__init__()
        if d_model < 1:
            raise ValueError(f"d_model: got {d_model}, expected 1 or more")
        if d_model % 2 and not pad_odd:
            raise ValueError(
                f"d_model: got {d_model}, expected an even width, since sines and cosines come in pairs; "
                "pad_odd=True fills the last column with zeros"
            )
        if not 0 < base < math.inf:
            raise ValueError(f"base: got {base}, expected finite numbers greater than 0")
        self.d_model = d_model
        # Tensors, since the exporter rounds Python floats to float32; real ones also under a device context "meta".
        constant = partial(torch.tensor, dtype=torch.float64, device="cpu")
        self.turns = tuple(map(constant, turns_per_position(d_model, base)))
        self.sine, self.cosine = tuple(map(constant, SINE)), tuple(map(constant, COSINE))
        self.order = torch.arange(d_model // 2 * 2, device="cpu").reshape(2, -1).T.flatten()

    def forward(self, positions: Tensor) -> Tensor:
        """Return the sinusoids of `positions`.

        Args:
            positions: int64 (...), from -(2^31 - 1) to 2^31 - 1: a negative one is a distance backwards.

        Returns:
            float32 (..., D).

        Raises:
            ValueError: a position is outside that range.

        """
        # The exporter cannot follow a check on values.
        if not torch.compiler.is_exporting() and positions.numel():
            _check_positions(positions)
        position = positions.to(torch.float64).unsqueeze(-1)
        first, second, third, rest = (part.to(positions.device) for part in self.turns)
        # Up to the third part everything is exact: whole multiples of 2^-22, 2^-44, 2^-66, of 53 bits at most.
        turn = position * first
        turn = turn - turn.round()
        turn = turn + position * second
        turn = turn - turn.round()
        quarters = (turn * 4).round()
        # From left to right: close to a zero of sine or cosine, the remainder is small and still exact.
        angle = turn - quarters * 0.25 + position * third + position * rest
        square = angle * angle
        sine = (angle * polynomial(square, self.sine)).to(torch.float32)
        cosine = polynomial(square, self.cosine).to(torch.float32)
        # The rotation by -2 to 2 quarters is exact: its cosine and sine are 0, 1 or -1.
        quarters = quarters.to(torch.float32)
        turned = quarters.abs()
        along, across = 1 - turned, quarters * (2 - turned)
        halves = torch.cat((along * sine + across * cosine, along * cosine - across * sine), dim=-1)
        # A lookup instead of a reshape: an exported reshape may hold the sizes of the sample.
        vectors = halves.index_select(-1, self.order.to(positions.device))
        return F.pad(vectors, (0, 1)) if self.d_model % 2 else vectors

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"d_model={self.d_model}"


def sinusoid(positions: Tensor, d_model: int, base: float = 10000.0, pad_odd: bool = False) -> Tensor:
    """Return the sinusoids of int64 `positions` (...) as float32 (..., D), computed by `Sinusoid`.

    Args:
        positions: int64 (...), from -(2^31 - 1) to 2^31 - 1.
        d_model: width D of a vector; even, unless `pad_odd`.
        base: 10000 in Vaswani et al. 2017, section 3.5; greater than 0.
        pad_odd: for an odd width, fill the last column with zeros; default False.

    Raises:
        ValueError: an argument is outside its range.

    """
    vectors: Tensor = Sinusoid(d_model, base, pad_odd)(positions)
    return vectors


def _check_positions(positions: Tensor) -> None:
    for extreme in (int(positions.min()), int(positions.max())):
        if abs(extreme) >= POSITIONS:
            raise ValueError(f"positions: got {extreme}, expected {1 - POSITIONS} to {POSITIONS - 1}")
