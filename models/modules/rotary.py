"""Rotary positions (RoPE): queries and keys are turned by an angle that grows with the position.

Letters: B batch, L length, D model width, H heads, R rotary width (the rotated part of a head).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from preblock.models.modules.positions import check_position_ids, positions_of


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """What the angles are made of. A number that the scaling does not use keeps its default.

    Args:
        dim: R; even. Less than the width of a head for partial rotary.
        theta: base of the wavelengths; 10000 in the paper.
        scaling: a row of `SCALINGS`; default "default", none.
        factor: by how much longer the inputs are than those of pretraining.
        original_len: tokens of the longest input of pretraining.
        length: for "dynamic" and "longrope", tokens of the whole sequence, prompt and continuation: it decides the
            frequencies, so that they are a pure function of the position. Published code takes the longest
            length seen so far instead: there an earlier call or another row changes the vectors of this one.
        attention_factor: for "yarn" and "longrope", factor on cos and sin; None for the published formula.
        beta_fast: for "yarn", turns within `original_len` from which on a frequency is kept; default 32.
        beta_slow: for "yarn", turns within `original_len` below which a frequency is divided by `factor`; default 1.
        truncate: for "yarn", round the borders of the ramp outwards to whole pairs; default True.
        low_freq_factor: for "llama3", turns within `original_len` below which a frequency is divided by `factor`.
        high_freq_factor: for "llama3", turns within `original_len` above which a frequency is kept.
        short_factor: for "longrope", divisor of each of the R/2 frequencies where `length` is at most `original_len`.
        long_factor: the same where `length` is greater.
        frequencies: for "given", the R/2 frequencies in radians per position.
        angles: type in which positions and frequencies are multiplied; "float64" takes the cosine and the sine in it
            too, and rounds once. Default "float32".

    Raises:
        ValueError: a number is missing, out of range, or not one of the scaling's.

    """

    dim: int
    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 0.0
    original_len: int = 0
    length: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    frequencies: tuple[float, ...] = ()
    angles: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling: got {self.scaling!r}, allowed {', '.join(SCALINGS)}")
        for name in ("dim", "original_len", "length"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, allowed a whole number")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim: got {self.dim}, allowed an even width of 2 or more")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta: got {self.theta}, allowed more than 1")
        if self.angles not in ("float32", "float64"):
            raise ValueError(f"angles: got {self.angles!r}, allowed float32, float64")
        row = SCALINGS[self.scaling]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("dim", "theta", "scaling", "angles"):
                continue
            if field.name in row.needs:
                self._check_needed(field.name, value)
            elif field.name not in row.takes and value != field.default:
                raise ValueError(f"{field.name}: got {value}, allowed {field.default} with scaling {self.scaling!r}")
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor: got {self.attention_factor}, allowed more than 0, or None")
        if self.scaling == "dynamic" and self.dim == 2:
            raise ValueError("dim: got 2, allowed 4 or more with scaling 'dynamic'")
        if self.scaling == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast: got {self.beta_fast}, allowed at least beta_slow, {self.beta_slow}")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: got {self.high_freq_factor}, allowed more than low_freq_factor, "
                f"{self.low_freq_factor}"
            )

    def _check_needed(self, name: str, value: float | tuple[float, ...]) -> None:
        if isinstance(value, tuple):
            if len(value) != self.dim // 2 or not all(0 < number < math.inf for number in value):
                raise ValueError(f"{name}: got {value}, allowed {self.dim // 2} numbers of more than 0")
        elif not 0 < value < math.inf:
            raise ValueError(f"{name}: got {value}, allowed more than 0 with scaling {self.scaling!r}")


class RotaryPositions(nn.Module):
    """Cosines and sines of the angles, for `rotate` (Su et al. 2021, section 3.2.2).

    The angles are float32 products of position and frequency, as published models compute them: equal to those
    models at every position, and to the formula within 1e-2 at position 10^5. Nothing is trained. An export takes
    their cosines and sines in float64 and rounds them, at most one unit in the last place from here.

    Args:
        config: what the angles are made of.

    """

    frequencies: Tensor

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_factor = SCALINGS[config.scaling].attention_factor(config)
        self.register_buffer("frequencies", SCALINGS[config.scaling].frequencies(config), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the position of every token of `x`.

        Args:
            x: (B, L, D) vectors, whose floating-point type the result takes, or (B, L) ids, for float32.
            position_ids: int64 (1 or B, L); need not be consecutive. Excludes `offset`.
            offset: tokens already fed: an int, or int64 of shape (1,) or (B,); default 0.

        Returns:
            cos and sin, each (1 or B, L, R): the values of the R/2 pairs, twice over.

        Raises:
            ValueError: a position is negative, or is not less than `length` where the config has one.

        """
        # The exporter cannot follow a check on values; the service makes it before the graph runs.
        if not torch.compiler.is_compiling():
            check_position_ids(x, position_ids, offset)
        positions = positions_of(x, position_ids, offset)
        if self.config.length and not torch.compiler.is_compiling() and positions.numel():
            highest = int(positions.max())
            if highest >= self.config.length:
                raise ValueError(f"position: got {highest}, allowed 0 to {self.config.length - 1}")
        angle = positions.unsqueeze(-1).to(self.frequencies.dtype) * self.frequencies
        if torch.compiler.is_compiling():
            # The last bit of onnxruntime's float32 cosine depends on where in the tensor an angle stands.
            angle = angle.to(torch.float64)
        cos, sin = (part.to(torch.float32) * self.attention_factor for part in (angle.cos(), angle.sin()))
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((sin, sin), dim=-1).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Only the device is followed: rounded to bfloat16, a frequency is off by whole turns at position 2000.
        frequencies = SCALINGS[self.config.scaling].frequencies(self.config)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self


def rotate(query_or_key: Tensor, cos: Tensor, sin: Tensor, layout: Literal["half", "interleaved"] = "half") -> Tensor:
    """Turn each pair of the first R columns of every head by the angle of its position; the others stay.

    Args:
        query_or_key: (B, H, L, width of a head).
        cos: (1 or B, L, R), from `RotaryPositions`.
        sin: the same.
        layout: which columns are a pair: "half" column j and j + R/2 (llama, gpt-neox), "interleaved" 2j and 2j + 1
            (gpt-j; Su et al. 2021, equation 34).

    Returns:
        As `query_or_key`.

    Raises:
        ValueError: the layout is not known, or R exceeds the width of a head.

    """
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout: got {layout!r}, allowed 'half', 'interleaved'")
    dim = cos.shape[-1]
    if dim > query_or_key.shape[-1]:
        raise ValueError(f"cos: got {dim} columns, allowed up to the width {query_or_key.shape[-1]} of a head")
    turned, rest = query_or_key[..., :dim], query_or_key[..., dim:]
    cos, sin = cos[..., : dim // 2].unsqueeze(1), sin[..., : dim // 2].unsqueeze(1)
    if layout == "half":
        a, b = turned[..., : dim // 2], turned[..., dim // 2 :]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


# The order and the type of each step below are those of the published code: float32 sums depend on them.


def _exponents(config: RotaryConfig) -> Tensor:
    # A real tensor also where the parameters are built without storage: it is derived, and never loaded.
    return torch.arange(0, config.dim, 2, dtype=getattr(torch, config.angles), device="cpu") / config.dim


def _default(config: RotaryConfig) -> Tensor:
    return 1.0 / config.theta ** _exponents(config)


def _linear(config: RotaryConfig) -> Tensor:
    return _default(config) / config.factor


def _dynamic(config: RotaryConfig) -> Tensor:
    if config.length <= config.original_len:
        return _default(config)
    # A tensor, since the published code stretches theta in float32.
    stretched = config.factor * torch.tensor(config.length, device="cpu") / config.original_len - (config.factor - 1)
    return 1.0 / (config.theta * stretched ** (config.dim / (config.dim - 2))) ** _exponents(config)


def _yarn(config: RotaryConfig) -> Tensor:
    def pair_that_turns(times: float) -> float:
        rest = math.log(config.original_len / (times * 2 * math.pi))
        return config.dim * rest / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001
    wavelength = config.theta ** _exponents(config)
    ramp = (torch.arange(config.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _llama3(config: RotaryConfig) -> Tensor:
    frequencies = _default(config)
    wavelength = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    share = (config.original_len / wavelength - low) / (high - low)
    blended = (1 - share) * frequencies / config.factor + share * frequencies
    scaled = torch.where(wavelength > config.original_len / low, frequencies / config.factor, blended)
    return torch.where(wavelength < config.original_len / high, frequencies, scaled)


def _longrope(config: RotaryConfig) -> Tensor:
    factors = config.long_factor if config.length > config.original_len else config.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * config.theta ** _exponents(config))


def _given(config: RotaryConfig) -> Tensor:
    return torch.tensor(config.frequencies, dtype=getattr(torch, config.angles), device="cpu")


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
    """One row: the R/2 frequencies in radians per position, the factor on cos and sin, the numbers it uses."""

    frequencies: Callable[[RotaryConfig], Tensor]
    attention_factor: Callable[[RotaryConfig], float]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


SCALINGS = {
    "default": Scaling(_default, _one),
    "linear": Scaling(_linear, _one, ("factor",)),
    "dynamic": Scaling(_dynamic, _one, ("factor", "original_len", "length")),
    "yarn": Scaling(
        _yarn,
        _yarn_attention,
        ("factor", "original_len", "beta_fast", "beta_slow"),
        ("attention_factor", "truncate"),
    ),
    "llama3": Scaling(_llama3, _one, ("factor", "original_len", "low_freq_factor", "high_freq_factor")),
    "longrope": Scaling(
        _longrope,
        _longrope_attention,
        ("factor", "original_len", "length", "short_factor", "long_factor"),
        ("attention_factor",),
    ),
    "given": Scaling(_given, _one, ("frequencies",)),
}
"""Scalings for inputs longer than those of pretraining: none (Su et al. 2021); linear (Chen et al. 2023); dynamic
NTK (bloc97 and emozilla 2023); yarn (Peng et al. 2023); llama3 (Dubey et al. 2024); longrope (Ding et al. 2024).
"given" is no formula: the frequencies themselves."""


@dataclass(frozen=True, kw_only=True)
class RotaryOutput:
    """Cosines and sines that a front-end gives beside its vectors.

    Args:
        name: what ends the names of the two outputs, after "_": the type of layer where layers differ; default "",
            for `rotary_cos` and `rotary_sin`.
        layout: which columns of a head are a pair, as in `rotate`; default "half".
        config: what the angles are made of.

    Raises:
        ValueError: the name or the layout is not allowed.

    """

    config: RotaryConfig
    name: str = ""
    layout: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_]*|", str(self.name)):
            raise ValueError(f"rotary.name: got {self.name!r}, allowed lower-case letters, digits and '_'")
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f"rotary.layout: got {self.layout!r}, allowed 'half', 'interleaved'")

    def named(self, part: str) -> str:
        """Return `part` with the ending: rotary_cos, rotary_cos_full_attention."""
        return f"{part}_{self.name}" if self.name else part

    def to_document(self) -> dict[str, Any]:
        """Return it as plain values, without the numbers that keep their default."""
        numbers = {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self.config)
            if (value := getattr(self.config, field.name)) != field.default or field.name in ("theta", "scaling")
        }
        return {"name": self.name, "layout": self.layout, **numbers}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "RotaryOutput":
        """Return what `to_document` wrote.

        Raises:
            ValueError: a field is not known, or its value not allowed.

        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
        }
        own = {name: values.pop(name) for name in ("name", "layout") if name in values}
        known = {field.name: field.type for field in fields(RotaryConfig)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"rotary.{name} is not known, allowed are {', '.join(['name', 'layout', *known])}")
            if known[name] in (float, float | None, bool, tuple[float, ...]):  # the others have checks of their own
                _check_number(f"rotary.{name}", value, known[name])
        if "dim" not in values:
            raise ValueError("rotary.dim: got none, allowed an even width of 2 or more")
        return cls(config=RotaryConfig(**values), **own)


def _check_number(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless `value` is of `kind`, the annotation of a field; a whole number is a float too."""
    several = kind == tuple[float, ...]
    items = value if several and isinstance(value, tuple) else (value,)
    if several != isinstance(value, tuple) or not all(
        isinstance(item, int | float) and isinstance(item, bool) == (kind is bool) for item in items
    ):
        allowed = "true or false" if kind is bool else "numbers" if several else "a number"
        raise ValueError(f"{name}: got {value!r}, allowed {allowed}")
