"""Sinusoids of a position: exact ones of any position, and the tables of libraries, bit for bit.

They serve different goals. A model trained here needs exact values. A published checkpoint without a stored table
was trained with the values of its library, most of them less exact.

Letters: D width of a vector, `...` any shape of positions.
"""

import math
from collections.abc import Mapping
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

POSITIONS = 2**31
"""Exclusive bound of absolute positions; the parts of a frequency have enough bits for it."""

TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918462")
SINE = (
    6.283185307179586,
    -41.341702240399634,
    81.60524927594804,
    -76.70585970427454,
    42.058685020160894,
    -15.093804209987114,
    3.7808689593022957,
)
"""sin(2 pi x) = x * sum(SINE[k] * x^2k), and cos(2 pi x) without the factor x, for |x| <= 1/8 + 2^-14, with a relative
error below 2^-54: the Chebyshev interpolants in x^2."""
COSINE = (
    1.0,
    -19.739208802178716,
    64.93939402266824,
    -85.4568172066438,
    60.24464135270201,
    -26.426253275854723,
    7.903206911569678,
    -1.6990343940660637,
)


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
        self.turns = tuple(map(constant, _turns_per_position(d_model, base)))
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
        if not torch.compiler.is_compiling() and positions.numel():
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
        sine = (angle * _polynomial(square, self.sine)).to(torch.float32)
        cosine = _polynomial(square, self.cosine).to(torch.float32)
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


@lru_cache(maxsize=16)
def _turns_per_position(d_model: int, base: float) -> tuple[tuple[float, ...], ...]:
    """Return the frequencies as turns per position, in four parts to be added: 4 times D // 2 numbers.

    The first three parts are whole multiples of 2^-22, 2^-44 and 2^-66: their products with a position of 31 bits fit
    the 53 bits of a float64. Whole turns are dropped, because they change nothing at a whole position.
    """
    columns = []
    with localcontext(Context(prec=60)):
        for column in range(0, d_model - 1, 2):
            rest = Fraction(1 / (TWO_PI * Decimal(base) ** (Decimal(column) / d_model))) % 1
            parts = []
            for bits in (22, 44, 66):
                part = Fraction(round(rest * 2**bits), 2**bits)
                parts.append(float(part))
                rest -= part
            columns.append((*parts, float(rest)))
    return tuple(tuple(column[part] for column in columns) for part in range(4))


def _check_positions(positions: Tensor) -> None:
    for extreme in (int(positions.min()), int(positions.max())):
        if abs(extreme) >= POSITIONS:
            raise ValueError(f"positions: got {extreme}, expected {1 - POSITIONS} to {POSITIONS - 1}")


def _polynomial(x: Tensor, coefficients: tuple[Tensor, ...]) -> Tensor:
    """Return sum(coefficients[k] * x^k), by Horner's rule."""
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


class SinusoidBuilder(Protocol):
    """Builds the table of a library, bit for bit."""

    def __call__(self, rows: int, d_model: int, zero_row: int | None = None) -> Tensor:
        """Return the vectors of the positions 0 to `rows` - 1.

        Args:
            rows: number of positions.
            d_model: width D of a vector.
            zero_row: row to fill with zeros, as M2M100, Speech2Text and XGLM do; Marian, Pegasus, CTRL and
                Whisper do not. Default none.

        Returns:
            float32 (rows, D), on the CPU.

        Raises:
            ValueError: `zero_row` is outside 0 to rows - 1, or the recipe divides by zero at that width.

        """


def _pair_half(rows: int, d_model: int, zero_row: int | None = None) -> Tensor:
    angle = _float64_angle(rows, d_model)
    return _table(np.concatenate((np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])), axis=1), zero_row)


def _pair_interleaved(rows: int, d_model: int, zero_row: int | None = None) -> Tensor:
    angle = _float64_angle(rows, d_model)
    table = np.empty_like(angle)
    table[:, 0::2], table[:, 1::2] = np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])
    return _table(table, zero_row)


def _pair_half_float32(rows: int, d_model: int, zero_row: int | None = None) -> Tensor:
    column = torch.arange(d_model, dtype=torch.float32, device="cpu")
    frequency = 1 / torch.pow(10000, (2 * (column // 2)) / d_model)
    angle = torch.arange(rows, dtype=torch.float32, device="cpu").unsqueeze(1) * frequency
    return _table(torch.cat((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=1), zero_row)


def _tensor2tensor(rows: int, d_model: int, zero_row: int | None = None) -> Tensor:
    if d_model < 4:
        raise ValueError(f"d_model: got {d_model}, expected 4 or more")
    half = d_model // 2
    step = math.log(10000) / (half - 1)
    frequency = torch.exp(torch.arange(half, dtype=torch.float32, device="cpu") * -step)
    angle = torch.arange(rows, dtype=torch.float32, device="cpu").unsqueeze(1) * frequency
    return _table(F.pad(torch.cat((angle.sin(), angle.cos()), dim=1), (0, d_model % 2)), zero_row)


RECIPES: Mapping[str, SinusoidBuilder] = {
    "pair_half": _pair_half,
    "pair_interleaved": _pair_interleaved,
    "pair_half_float32": _pair_half_float32,
    "tensor2tensor": _tensor2tensor,
}
"""Library tables by name.

name | frequency of pair j | columns | arithmetic | families
pair_half | 10000^(-2j/D) (Vaswani et al. 2017, section 3.5) | sines, then cosines | float64, rounded | Marian, Pegasus
pair_interleaved | the same | even sines, odd cosines | float64, rounded | XLM, DistilBERT (where they start)
pair_half_float32 | the same | sines, then cosines | float32 | CTRL (Keskar et al. 2019)
tensor2tensor | 10000^(-j/(D/2-1)) (Vaswani et al. 2018) | sines, then cosines; zeros last if D is odd | float32 |
    M2M100, Speech2Text, XGLM, Whisper's encoder

Tables in float32 are those of the machine, here as in the library: with and without AVX2, powers and sines of torch
may differ in the last bit.
"""


def _float64_angle(rows: int, d_model: int) -> NDArray[np.float64]:
    """Return position / 10000^(2j/D) for every position and column: float64 (rows, D)."""
    # One power at a time, as the libraries do: on arrays numpy may choose another routine, of other last bits.
    wavelength = np.array([np.power(10000, 2 * (column // 2) / d_model) for column in range(d_model)])
    angle: NDArray[np.float64] = np.arange(rows)[:, None] / wavelength
    return angle


def _table(values: NDArray[np.float64] | Tensor, zero_row: int | None) -> Tensor:
    """Return `values` (rows, D) rounded to float32, with zeros in the row `zero_row`."""
    table = torch.as_tensor(values, device="cpu").to(torch.float32)
    if zero_row is not None:
        if not 0 <= zero_row < len(table):
            raise ValueError(f"zero_row: got {zero_row}, expected 0 to {len(table) - 1}")
        table[zero_row] = 0
    return table
