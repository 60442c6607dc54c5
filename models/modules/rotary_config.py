"""Rotary angles as plain values.

Letters: R rotary width (the rotated part of a head).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from preblock.models.serialization import Flag, Number, Numbers, Text, Whole, check_fields

MAX_WIDTH = 2**16
"""Largest R: a hundred times the widest known head. The frequencies of a wider one would fill the memory."""


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
    attention_factor: Number | None = None
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
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor: got {self.attention_factor}, expected more than 0, or None")
        if self.scaling == "dynamic" and self.dim == 2:
            raise ValueError("dim: got 2, expected 4 or more with scaling 'dynamic'")
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


def _one(_: RotaryConfig) -> float:
    return 1.0


def _yarn_attention(config: RotaryConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    return yarn_scale(config.factor, 1.0)


def _longrope_attention(config: RotaryConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_len))


def yarn_scale(factor: float, weight: float) -> float:
    """Return the factor on cos and sin for inputs `factor` times as long (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Scaling(NamedTuple):
    """One row: the factor on cos and sin, and the numbers it uses; `frequencies.py` has the frequencies."""

    attention_factor: Callable[[RotaryConfig], float]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


SCALINGS = {
    "default": Scaling(_one),
    "linear": Scaling(_one, ("factor",)),
    "dynamic": Scaling(_one, ("factor", "original_len", "length")),
    "yarn": Scaling(
        _yarn_attention,
        ("factor", "original_len", "beta_fast", "beta_slow"),
        ("attention_factor", "truncate"),
    ),
    "llama3": Scaling(_one, ("factor", "original_len", "low_freq_factor", "high_freq_factor")),
    "longrope": Scaling(
        _longrope_attention,
        ("factor", "original_len", "length", "short_factor", "long_factor"),
        ("attention_factor",),
    ),
    "proportional": Scaling(_one, ("factor", "turning_pairs")),
    "given": Scaling(_one, ("frequencies",)),
}
"""Scalings for longer inputs than in pretraining: none (Su et al. 2021); linear (Chen et al. 2023); dynamic
NTK (bloc97 and emozilla 2023); yarn (Peng et al. 2023); llama3 (Dubey et al. 2024); longrope (Ding et al. 2024);
proportional, where the first pairs turn alone (Gemma 4, transformers 5.24).
"given" is no formula: the frequencies themselves."""


def attention_factor(config: RotaryConfig) -> float:
    """Return the factor on cosines and sines."""
    return SCALINGS[config.scaling].attention_factor(config)
