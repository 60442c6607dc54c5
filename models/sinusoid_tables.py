"""Tables of sinusoids as NumPy arrays: the exact ones, and those of libraries, bit for bit.

They serve different goals. A model trained here needs exact values. A published checkpoint without a stored table
was trained with the values of its library, most of them less exact.

Letters: D width of a vector, `...` any shape of positions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.models.torch_import import import_torch

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


@lru_cache(maxsize=16)
def turns_per_position(width: int, base: float = 10000.0) -> tuple[tuple[float, ...], ...]:
    """Return the frequencies as turns per position, in four parts to be added: 4 times D // 2 numbers.

    The first three parts are whole multiples of 2^-22, 2^-44 and 2^-66: their products with a position of 31 bits fit
    the 53 bits of a float64. Whole turns are dropped, because they change nothing at a whole position.
    """
    columns = []
    with localcontext(Context(prec=60)):
        for column in range(0, width - 1, 2):
            rest = Fraction(1 / (TWO_PI * Decimal(base) ** (Decimal(column) / width))) % 1
            parts = []
            for bits in (22, 44, 66):
                part = Fraction(round(rest * 2**bits), 2**bits)
                parts.append(float(part))
                rest -= part
            columns.append((*parts, float(rest)))
    return tuple(tuple(column[part] for column in columns) for part in range(4))


def exact_sinusoids(positions: NDArray[np.int64], width: int, base: float = 10000.0) -> NDArray[np.float32]:
    """Return the exact sinusoids of `positions`, with the bits of `modules.sinusoids.Sinusoid`, which explains them.

    Args:
        positions: int64 (...), from -(2^31 - 1) to 2^31 - 1.
        width: D; with zeros in the last column if it is odd.
        base: 10000 in Vaswani et al. 2017, section 3.5; greater than 0.

    Returns:
        float32 (..., D).

    """
    position = positions.astype(np.float64)[..., None]
    first, second, third, rest = map(np.array, turns_per_position(width, base))
    turn = position * first
    turn -= np.rint(turn)
    turn += position * second
    turn -= np.rint(turn)
    quarters = np.rint(turn * 4)
    angle = turn - quarters * 0.25 + position * third + position * rest
    square = angle * angle
    sine = (angle * polynomial(square, SINE)).astype(np.float32)
    cosine = polynomial(square, COSINE).astype(np.float32)
    quarters = quarters.astype(np.float32)
    turned = np.abs(quarters)
    along, across = 1 - turned, quarters * (2 - turned)
    vectors = np.zeros((*positions.shape, width), dtype=np.float32)
    vectors[..., 0 : width - 1 : 2] = along * sine + across * cosine
    vectors[..., 1::2] = along * cosine - across * sine
    return vectors


def polynomial(x: Any, coefficients: Sequence[Any]) -> Any:
    """Return sum(coefficients[k] * x^k), by Horner's rule, for an array or a tensor."""
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def check_grid_width(width: int) -> None:
    """Raise ValueError unless rows and columns of a grid have sinusoids side by side in `width` columns."""
    if width % 4:
        raise ValueError(
            f"d_model: got {width}, expected a multiple of 4: half for the row and half for the column, "
            "each in pairs of sine and cosine"
        )


def library_table(recipe: str, rows: int, width: int, zero_row: int | None = None) -> NDArray[np.float32]:
    """Return the table of a sinusoid recipe, bit for bit.

    Args:
        recipe: a key of `RECIPES`.
        rows: number of positions, from 0 on.
        width: D.
        zero_row: row to fill with zeros, as M2M100, Speech2Text and XGLM do; Marian, Pegasus, CTRL and
            Whisper do not. Default none.

    Returns:
        float32 (rows, D).

    Raises:
        MissingTorchError: the recipe needs torch, and it is not installed.
        ValueError: as `check_recipe`.

    """
    check_recipe(recipe, rows, width, zero_row)
    table = RECIPES[recipe](rows, width)
    if zero_row is not None:
        table[zero_row] = 0
    return table


def check_recipe(recipe: str, rows: int, width: int, zero_row: int | None) -> None:
    """Raise ValueError unless `library_table` has a table for these arguments."""
    if rows < 1:
        raise ValueError(f"rows: got {rows}, expected 1 or more for a table {recipe!r}")
    if zero_row is not None and not 0 <= zero_row < rows:
        raise ValueError(f"zero_row: got {zero_row}, expected 0 to {rows - 1}")
    if recipe == "tensor2tensor" and width < 4:  # it would divide by zero
        raise ValueError(f"d_model: got {width}, expected 4 or more")


def _pair_half(rows: int, width: int) -> NDArray[np.float32]:
    angle = _float64_angle(rows, width)
    return np.concatenate((np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])), axis=1).astype(np.float32)


def _pair_interleaved(rows: int, width: int) -> NDArray[np.float32]:
    angle = _float64_angle(rows, width)
    table = np.empty((rows, width), dtype=np.float32)
    table[:, 0::2], table[:, 1::2] = np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])
    return table


def _float64_angle(rows: int, width: int) -> NDArray[np.float64]:
    """Return position / 10000^(2j/D) for every position and column: float64 (rows, D)."""
    # One power at a time, as the libraries do: on arrays numpy may choose another routine, of other last bits.
    wavelength = np.array([np.power(10000, 2 * (column // 2) / width) for column in range(width)])
    angle: NDArray[np.float64] = np.arange(rows)[:, None] / wavelength
    return angle


def _pair_half_float32(rows: int, width: int) -> NDArray[np.float32]:
    torch = import_torch("table: the sinusoid recipe 'pair_half_float32'")
    column = torch.arange(width, dtype=torch.float32, device="cpu")
    frequency = 1 / torch.pow(10000, (2 * (column // 2)) / width)
    angle = torch.arange(rows, dtype=torch.float32, device="cpu").unsqueeze(1) * frequency
    return _array(torch.cat((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=1))


def _tensor2tensor(rows: int, width: int) -> NDArray[np.float32]:
    torch = import_torch("table: the sinusoid recipe 'tensor2tensor'")
    half = width // 2
    step = math.log(10000) / (half - 1)
    frequency = torch.exp(torch.arange(half, dtype=torch.float32, device="cpu") * -step)
    angle = torch.arange(rows, dtype=torch.float32, device="cpu").unsqueeze(1) * frequency
    table = torch.cat((angle.sin(), angle.cos()), dim=1)
    return _array(torch.nn.functional.pad(table, (0, width % 2)))


def _array(tensor: Any) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.numpy()
    return values


RECIPES: Mapping[str, Callable[[int, int], NDArray[np.float32]]] = {
    "pair_half": _pair_half,
    "pair_interleaved": _pair_interleaved,
    "pair_half_float32": _pair_half_float32,
    "tensor2tensor": _tensor2tensor,
}
"""Library tables by name, without zero rows: `library_table` has them.

name | frequency of pair j | columns | arithmetic | families
pair_half | 10000^(-2j/D) (Vaswani et al. 2017, section 3.5) | sines, then cosines | float64, rounded | Marian, Pegasus
pair_interleaved | the same | even sines, odd cosines | float64, rounded | XLM, DistilBERT (where they start)
pair_half_float32 | the same | sines, then cosines | float32 | CTRL (Keskar et al. 2019)
tensor2tensor | 10000^(-j/(D/2-1)) (Vaswani et al. 2018) | sines, then cosines; zeros last if D is odd | float32 |
    M2M100, Speech2Text, XGLM, Whisper's encoder

Tables in float32 need torch, and are those of the machine, here as in the library. One sine in twenty of torch differs
in the last bit from the exact sine rounded once.
"""
