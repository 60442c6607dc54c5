"""Frequencies of rotary angles and slopes of attention biases, with the bits of PyTorch, from NumPy alone.

PyTorch and transformers compute them in float32, and one unit of a frequency changes cosines at far positions. So the
order and the type of each step follow the published code.

Letters: R rotary width, H heads, D width.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from preblock.models.float32_powers import Floats, powers
from preblock.models.modules.bias import AlibiConfig, T5Config
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.torch_import import import_torch

Frequencies = NDArray[Any]


def rotary_frequencies(config: RotaryConfig) -> Frequencies:
    """Return the R/2 frequencies in radians per position, in the type `config.angles`."""
    # Infinite wavelengths and ratios belong to the published formulas.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return _SCALED[config.scaling](config)


def _wavelengths(config: RotaryConfig, theta: float | None = None, pairs: int | None = None) -> Frequencies:
    """Return the wavelengths of the first `pairs` pairs, default all, over 2 pi."""
    base = config.theta if theta is None else theta
    exponents: Frequencies = (np.arange(0, config.dim, 2, dtype=config.angles) / config.dim)[:pairs]
    if config.angles == "float32":
        return powers(base, exponents)
    return np.array([base**exponent for exponent in exponents.tolist()])


def _default(config: RotaryConfig) -> Frequencies:
    return 1 / _wavelengths(config)


def _linear(config: RotaryConfig) -> Frequencies:
    return _default(config) / config.factor


def _dynamic(config: RotaryConfig) -> Frequencies:
    if config.length <= config.original_len:
        return _default(config)
    # In float32, but for the power: it is rounded once.
    stretched = np.float32(config.length) * np.float32(config.factor) / np.float32(config.original_len)
    stretched -= np.float32(config.factor - 1)
    grown = np.float32(float(stretched) ** (config.dim / (config.dim - 2)))
    return 1 / _wavelengths(config, float(np.float32(config.theta) * grown))


def _yarn(config: RotaryConfig) -> Frequencies:
    def pair_that_turns(times: float) -> float:
        rest = math.log(config.original_len / (times * 2 * math.pi))
        return config.dim * rest / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    wavelengths = _wavelengths(config)
    ramp = (np.arange(config.dim // 2, dtype=np.float32) - low) / (high - low)
    kept = 1 - ramp.clip(0, 1)
    blended: Frequencies = 1 / (config.factor * wavelengths) * (1 - kept) + 1 / wavelengths * kept
    return blended


def _llama3(config: RotaryConfig) -> Frequencies:
    frequencies = _default(config)
    # PyTorch divides a number by a tensor as its product with the reciprocals.
    wavelengths = 1 / frequencies * (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    share = (1 / wavelengths * config.original_len - low) / (high - low)
    blended = (1 - share) * frequencies / config.factor + share * frequencies
    scaled = np.where(wavelengths > config.original_len / low, frequencies / config.factor, blended)
    return np.where(wavelengths < config.original_len / high, frequencies, scaled)


def _longrope(config: RotaryConfig) -> Frequencies:
    factors = config.long_factor if config.length > config.original_len else config.short_factor
    divisors: Frequencies = np.array(factors, dtype=np.float32) * _wavelengths(config)
    return 1 / divisors


def _proportional(config: RotaryConfig) -> Frequencies:
    turning = 1 / _wavelengths(config, pairs=config.turning_pairs) / config.factor
    return np.concatenate((turning, np.zeros(config.dim // 2 - config.turning_pairs, dtype=turning.dtype)))


def _given(config: RotaryConfig) -> Frequencies:
    return np.array(config.frequencies, dtype=config.angles)


_SCALED: dict[str, Callable[[RotaryConfig], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "given": _given,
}
"""The frequencies of each row of `SCALINGS`."""


def alibi_slopes(config: AlibiConfig) -> Floats:
    """Return the slopes of all heads, float32 (H,), rounded to the arithmetic of the bias."""
    slopes = SLOPES[config.recipe](config.heads)
    return slopes if config.arithmetic == "float32" else slopes.astype(ml_dtypes.bfloat16).astype(np.float32)


def _exact_slopes(heads: int) -> Floats:
    """Return 2^(-8/n), 2^(-16/n), ..., 2^-8 for n heads, a power of two (Press et al. 2022, section 3).

    Other counts take those of the next lower power of two, then every other one of the next higher, as the paper's
    code does. Computed in float64 and rounded once.
    """
    lower = _lower_power(heads)
    exponents = [*_exponents(lower), *_exponents(2 * lower)[::2]][:heads]
    return np.array([2.0**exponent for exponent in exponents], dtype=np.float32)


def _exponents(heads: int) -> list[float]:
    return [-8 * i / heads for i in range(1, heads + 1)]


def _float32_powers(heads: int) -> Floats:
    """Return the slopes as the powers of the first one, in float32, to the bit as bloom and falcon compute them."""
    lower = _lower_power(heads)
    first = powers(2 ** (-8 / lower), np.arange(1, 1 + lower, dtype=np.float32))
    between = powers(2 ** (-4 / lower), np.arange(1, 1 + 2 * (heads - lower), 2, dtype=np.float32))
    return np.concatenate((first, between))


def _float32_reciprocals(heads: int) -> Floats:
    """Return the slopes as the reciprocals of powers of two, in float32, to the bit as mpt computes them."""
    higher = 2 * _lower_power(heads - 1) if heads > 1 else 1
    slopes = np.reciprocal(powers(2, np.arange(1, higher + 1, dtype=np.float32) * np.float32(8 / higher)))
    return slopes if higher == heads else np.concatenate((slopes[1::2], slopes[::2]))[:heads]


def _lower_power(heads: int) -> int:
    """Return the highest power of two not above `heads`."""
    return 1 << (heads.bit_length() - 1)


SLOPES: dict[str, Callable[[int], Floats]] = {
    "exact": _exact_slopes,
    "float32_powers": _float32_powers,
    "float32_reciprocals": _float32_reciprocals,
}
"""How the slopes are computed, by name: they are the same but for the last bits."""


def t5_borders(config: T5Config) -> list[int]:
    """Return the least distance of each bucket of a direction but the first: the bucket of a distance is how many
    of them do not exceed it (Raffel et al. 2019, section 2.1).

    Raises:
        MissingTorchError: a border depends on the last bit of a logarithm, and torch is not installed.

    """
    one_way = config.buckets // 2 if config.bidirectional else config.buckets
    exact = one_way // 2

    def bucket(distance: int, log: Callable[[float], float]) -> int:
        if distance < exact:
            return distance
        # In this order of operations, as published: the borders of the buckets depend on its rounding.
        grown = np.float32(log(float(np.float32(distance) / np.float32(exact))))
        steps = grown / np.float32(math.log(config.max_distance / exact)) * np.float32(one_way - exact)
        return min(exact + int(steps), one_way - 1)

    def find(log: Callable[[float], float]) -> list[int]:
        distances = range(config.max_distance + 1)
        return [bisect_left(distances, place, key=lambda at: bucket(at, log)) for place in range(1, one_way)]

    borders = find(_log_below)
    if borders == find(_log_above):
        return borders
    torch = import_torch(f"bias: a T5 bias of {config.buckets} buckets to distance {config.max_distance}")
    return find(lambda ratio: float(torch.log(torch.tensor(ratio, dtype=torch.float32, device="cpu"))))


LESS_EXACT = (7, 47, 49)
"""Whole numbers up to 128 whose float32 logarithm in PyTorch is not the nearest one."""


def _log_below(ratio: float) -> float:
    """Return a lower bound of PyTorch's float32 logarithm: its error is less than one unit in the last place."""
    nearest = np.float32(math.log(ratio))
    if _is_nearest(ratio) or float(nearest) <= math.log(ratio):
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(-np.inf)))


def _log_above(ratio: float) -> float:
    """Return an upper bound of PyTorch's float32 logarithm."""
    nearest = np.float32(math.log(ratio))
    if _is_nearest(ratio) or float(nearest) >= math.log(ratio):
        return float(nearest)
    return float(np.nextafter(nearest, np.float32(np.inf)))


def _is_nearest(ratio: float) -> bool:
    return ratio.is_integer() and ratio <= 128 and ratio not in LESS_EXACT


def relative_frequencies(width: int) -> Floats:
    """Return the D/2 frequencies of relative sinusoids, float32 (Dai et al. 2019, section 3.3)."""
    return np.reciprocal(powers(10000, np.arange(0, width, 2, dtype=np.float32) / np.float32(width)))
