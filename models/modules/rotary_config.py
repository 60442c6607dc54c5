"""Rotary angles as plain values, and their frequencies, with the bits of PyTorch, from NumPy alone.

PyTorch and transformers compute them in float32, and one unit of a frequency changes cosines at far positions. So the
order and the type of each step follow the published code.

Letters: R rotary width (the rotated part of a head).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.models.float32_powers import powers
from preblock.models.serialization import Flag, Number, Numbers, Positive, Text, Whole, check_fields

Frequencies = NDArray[Any]

MAX_WIDTH = 2**16
"""Largest R: a hundred times the widest known head. The frequencies of a wider one would fill the memory."""
MIN_TURNS, MAX_TURNS = 1e-30, 1e30
"""Bounds of `beta_slow` and `beta_fast`: the formula of yarn has no value far beyond them."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Width, base and scaling of rotary angles. Numbers unused by the scaling keep their defaults.

    Args:
        dim: R; even. Less than the width of a head for partial rotary.
        theta: base of the wavelengths; 10000 in the paper.
        scaling: a row of `SCALINGS`; default "default", none.
        factor: length of the inputs over their length in pretraining.
        original_len: tokens of the longest input of pretraining.
        length: for "dynamic" and "longrope", tokens of the whole sequence, prompt and continuation: it decides the
            frequencies, so vectors depend on the position alone. Published code uses the longest length seen so far
            instead; there, an earlier call or another row changes the vectors.
        attention_factor: for "yarn" and "longrope", factor on cos and sin; None for the published formula.
        beta_fast: for "yarn", least turns within `original_len` to keep a frequency; default 32.
        beta_slow: for "yarn", most turns within `original_len` to divide a frequency by `factor`; default 1.
        truncate: for "yarn", round the borders of the ramp outwards to whole pairs; default True.
        low_freq_factor: for "llama3", most turns within `original_len` to divide a frequency by `factor`.
        high_freq_factor: for "llama3", least turns within `original_len` to keep a frequency.
        short_factor: for "longrope", divisor of each of the R/2 frequencies if `length` is at most `original_len`.
        long_factor: the same if `length` is greater.
        turning_pairs: for "proportional", pairs that turn; the others of the R/2 pairs keep the angle 0.
        frequencies: for "given", the R/2 frequencies in radians per position.
        angles: type of the product of positions and frequencies; "float64" also computes cosine and sine in float64,
            and rounds once. Default "float32".

    Raises:
        ValueError: a number is missing, out of range, or not one of the scaling's.

    """

    dim: Whole
    theta: Number = 10000.0
    scaling: Text = "default"
    factor: Number = 0.0
    original_len: Whole = 0
    length: Whole = 0
    attention_factor: Positive | None = None
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    truncate: Flag = True
    low_freq_factor: Number = 0.0
    high_freq_factor: Number = 0.0
    short_factor: Numbers = ()
    long_factor: Numbers = ()
    turning_pairs: Whole = 0
    frequencies: Numbers = ()
    angles: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self, "rotary.")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling: got {self.scaling!r}, expected {', '.join(SCALINGS)}")
        if not 2 <= self.dim <= MAX_WIDTH or self.dim % 2:
            raise ValueError(f"dim: got {self.dim}, expected an even width of 2 to {MAX_WIDTH}")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta: got {self.theta}, expected more than 1")
        row = SCALINGS[self.scaling]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("dim", "theta", "scaling", "angles"):
                continue
            if field.name in row.needs:
                self._check_needed(field.name, value)
            elif field.name not in row.takes and value != field.default:
                raise ValueError(f"{field.name}: got {value}, expected {field.default} with scaling {self.scaling!r}")
        if self.scaling == "dynamic" and self.dim == 2:
            raise ValueError("dim: got 2, expected 4 or more with scaling 'dynamic'")
        for name in ("beta_slow", "beta_fast") if self.scaling == "yarn" else ():
            if not MIN_TURNS <= (value := getattr(self, name)) <= MAX_TURNS:
                raise ValueError(f"{name}: got {value}, expected {MIN_TURNS} to {MAX_TURNS}")
        if self.scaling == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast: got {self.beta_fast}, expected at least beta_slow, {self.beta_slow}")
        if self.turning_pairs > self.dim // 2:
            raise ValueError(f"turning_pairs: got {self.turning_pairs}, expected 1 to {self.dim // 2}, all pairs")
        if self.scaling == "longrope" and self.original_len == 1:
            raise ValueError("original_len: got 1, expected 2 or more with scaling 'longrope'")
        if self.scaling == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor}, expected at least low_freq_factor, "
                f"{self.low_freq_factor}"
            )

    def _check_needed(self, name: str, value: float | tuple[float, ...]) -> None:
        if isinstance(value, tuple):
            if len(value) != self.dim // 2 or not all(0 < number < math.inf for number in value):
                raise ValueError(f"{name}: got {value}, expected {self.dim // 2} numbers of more than 0")
        elif not 0 < value < math.inf:
            raise ValueError(f"{name}: got {value}, expected more than 0 with scaling {self.scaling!r}")


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


def yarn_scale(factor: float, weight: float) -> float:
    """Return the factor on cos and sin for inputs `factor` times as long (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Scaling(NamedTuple):
    """One row: the frequencies, and the numbers that they use."""

    frequencies: Callable[[RotaryConfig], Frequencies]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


SCALINGS = {
    "default": Scaling(_default),
    "linear": Scaling(_linear, ("factor",)),
    "dynamic": Scaling(_dynamic, ("factor", "original_len", "length")),
    "yarn": Scaling(_yarn, ("factor", "original_len", "beta_fast", "beta_slow"), ("attention_factor", "truncate")),
    "llama3": Scaling(_llama3, ("factor", "original_len", "low_freq_factor", "high_freq_factor")),
    "longrope": Scaling(
        _longrope, ("factor", "original_len", "length", "short_factor", "long_factor"), ("attention_factor",)
    ),
    "proportional": Scaling(_proportional, ("factor", "turning_pairs")),
    "given": Scaling(_given, ("frequencies",)),
}
"""Scalings for longer inputs than in pretraining: none (Su et al. 2021); linear (Chen et al. 2023); dynamic
NTK (bloc97 and emozilla 2023); yarn (Peng et al. 2023); llama3 (Dubey et al. 2024); longrope (Ding et al. 2024);
proportional, where the first pairs turn alone (Gemma 4, transformers 5.24).
"given" is no formula: the frequencies themselves."""


def attention_factor(config: RotaryConfig) -> float:
    """Return the factor on cosines and sines."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.scaling == "yarn":
        return yarn_scale(config.factor, 1.0)
    if config.scaling == "longrope" and config.factor > 1:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_len))
    return 1.0


def rotary_frequencies(config: RotaryConfig) -> Frequencies:
    """Return the R/2 frequencies in radians per position, in the type `config.angles`."""
    # Infinite wavelengths and ratios belong to the published formulas.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return SCALINGS[config.scaling].frequencies(config)
