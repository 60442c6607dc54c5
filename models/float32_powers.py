"""Powers in float32 with the bits of PyTorch on a processor with AVX-512, from NumPy alone.

PyTorch computes whole blocks of numbers with SLEEF (Shibata & Petrogalli 2020), and the rest with the C library.
SLEEF's power is exp(y log x) in pairs of float32: a number and its rounding error. About one in fifty differs in the
last bit from the exact power rounded once, so the code here repeats each rounding.
"""

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Numbers of a block: two registers of AVX-512. With AVX2 it has 16; the blocks themselves have the same bits."""

Floats = NDArray[np.float32]
Pair = tuple[Floats, Floats]
"""A sum of two numbers, the larger first."""

# The coefficients are SLEEF's, since other ones give other bits.
LOG_TWO = (0.69314718246459960938, -1.904654323148236017e-09)
LOG_FIRST = (0.66666662693023681640625, 3.69183861259614332084311e-09)
LOG_REST = (0.240320354700088500976562, 0.285112679004669189453125, 0.400007992982864379882812)
LOG_TWO_PARTS = (0.693145751953125, 1.428606765330187045e-06)
EXP = (
    0.00136324646882712841033936,
    0.00836596917361021041870117,
    0.0416710823774337768554688,
    0.166665524244308471679688,
    0.499999850988388061523438,
)


def powers(base: float, exponents: Floats) -> Floats:
    """Return base ** exponents in float32, rounded as `torch.pow` rounds one contiguous tensor of exponents.

    Args:
        base: greater than 0; rounded to float32 first.
        exponents: (n,), any finite numbers whose powers are normal float32 numbers.

    """
    with np.errstate(over="ignore"):
        rounded = np.float32(base)
    if np.isinf(rounded):
        return np.where(exponents > 0, np.float32(np.inf), np.float32(1))
    blocks = len(exponents) // BLOCK * BLOCK
    return np.concatenate((vector_powers(rounded, exponents[:blocks]), scalar_powers(rounded, exponents[blocks:])))


def scalar_powers(base: np.float32, exponents: Floats) -> Floats:
    """Return the powers as the C library computes them: NumPy asks it for each single number, not for an array."""
    return np.array([base**exponent for exponent in exponents], dtype=np.float32)


def vector_powers(base: np.float32 | Floats, exponents: Floats) -> Floats:
    """Return the powers as SLEEF computes them, for any length; also of as many bases as exponents."""
    return _exp(_times(_log(np.full_like(exponents, base)), exponents))


def _log(x: Floats) -> Pair:
    # x = 2^whole * part, with part between 3/4 and 3/2; log(part) = 2 artanh((part - 1) / (part + 1)).
    whole = np.frexp(x * np.float32(1 / 0.75))[1] - 1
    part = np.ldexp(x, -whole)
    ratio = _quotient(_exact_sum(np.float32(-1), part), _exact_sum(np.float32(1), part))
    square = _square(ratio)
    rest = _polynomial(square[0], LOG_REST)
    first = np.full_like(x, LOG_FIRST[0]), np.full_like(x, LOG_FIRST[1])
    slope = _sum(_times(square, rest), first)
    two = np.full_like(x, LOG_TWO[0]), np.full_like(x, LOG_TWO[1])
    total = _quick_sum(_times(two, whole.astype(np.float32)), (2 * ratio[0], 2 * ratio[1]))
    return _quick_sum(total, _product(_product(square, ratio), slope))


def _exp(x: Pair) -> Floats:
    # x = whole * log 2 + rest, and exp(rest) = 1 + rest + rest^2 * polynomial.
    whole = np.rint((x[0] + x[1]) * np.float32(1 / np.log(2)))
    zero = np.zeros_like(whole)
    for part in LOG_TWO_PARTS:
        x = _sum(x, (whole * np.float32(-part), zero))
    total = x[0] + x[1]
    rest = total, (x[0] - total) + x[1]
    grown = _quick_sum(rest, _times(_square(rest), _polynomial(rest[0], EXP)))
    one = np.ones_like(whole), zero
    high, low = _quick_sum(one, grown)
    result: Floats = np.ldexp(high + low, whole.astype(np.int32))
    return result


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = _fused(value, x, np.full_like(x, coefficient))
    return value


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return a * b + c, rounded once: the product of two float32 numbers is exact in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _exact_sum(a: np.float32 | Floats, b: Floats) -> Pair:
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _sum(a: Pair, b: Pair) -> Pair:
    total, error = _exact_sum(a[0], b[0])
    return total, error + (a[1] + b[1])


def _quick_sum(a: Pair, b: Pair) -> Pair:
    """Return a + b for |a| not below |b|."""
    total = a[0] + b[0]
    return total, a[0] - total + b[0] + a[1] + b[1]


def _times(a: Pair, b: Floats) -> Pair:
    product = a[0] * b
    return product, _fused(a[1], b, _fused(a[0], b, -product))


def _product(a: Pair, b: Pair) -> Pair:
    product = a[0] * b[0]
    return product, _fused(a[0], b[1], _fused(a[1], b[0], _fused(a[0], b[0], -product)))


def _square(a: Pair) -> Pair:
    product = a[0] * a[0]
    return product, _fused(a[0] + a[0], a[1], _fused(a[0], a[0], -product))


def _quotient(a: Pair, b: Pair) -> Pair:
    inverse = np.reciprocal(b[0])
    quotient = a[0] * inverse
    one = np.ones_like(quotient)
    error = _fused(-b[1], inverse, _fused(-b[0], inverse, one))
    return quotient, _fused(quotient, error, _fused(a[1], inverse, _fused(inverse, a[0], -quotient)))
