"""Configurations of pairwise attention biases: terms added to scores by the distance between query and key.

Their slopes, borders and frequencies have the bits of PyTorch, from NumPy alone. PyTorch and transformers compute them
in float32: the order and the type of each step follow the published code.

Letters: H heads, D width.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import ml_dtypes
import numpy as np

from preblock.models.float32_powers import Floats, powers
from preblock.models.serialization import Count, Flag, Keys, Positive, Rule, Text, check_fields
from preblock.models.torch_import import import_torch

MAX_HEADS = 2**16
"""Most heads of a bias without a table: hundreds of times the most known. The slopes of more would fill the memory."""


@dataclass(frozen=True, kw_only=True)
class AlibiConfig:
    """The arguments of `AlibiBias`."""

    kind: ClassVar[str] = "alibi"
    heads: Annotated[int, Rule(lambda heads: type(heads) is int and 1 <= heads <= MAX_HEADS, f"1 to {MAX_HEADS}")]
    anchor: Literal["query", "first", "last"] = "query"
    recipe: Text = "exact"
    arithmetic: Literal["float32", "bfloat16"] = "float32"
    divisor: Positive = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError unless every value is allowed."""
        check_fields(self)
        if self.recipe not in SLOPES:
            raise ValueError(f"recipe: got {self.recipe!r}, expected {', '.join(SLOPES)}")


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """The arguments of `T5RelativeBias`; `weight` names its table (buckets, H) in a checkpoint."""

    kind: ClassVar[str] = "t5"
    heads: Count
    buckets: Count
    max_distance: Count
    bidirectional: Flag
    weight: Keys = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes go together."""
        check_fields(self)
        least = 4 if self.bidirectional else 2
        if self.buckets < least or (self.bidirectional and self.buckets % 2):
            kind = "an even number of" if self.bidirectional else "a number of"
            raise ValueError(f"buckets: got {self.buckets}, expected {kind} {least} or more")
        exact = (self.buckets // 2 if self.bidirectional else self.buckets) // 2
        if self.max_distance <= exact:
            raise ValueError(f"max_distance: got {self.max_distance}, expected {exact + 1} or more")


@dataclass(frozen=True, kw_only=True)
class RelativeSinusoidConfig:
    """The arguments of `RelativeSinusoid`."""

    kind: ClassVar[str] = "relative_sinusoid"
    width: Count
    clamp_len: Count | None
    bidirectional: Flag

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are allowed."""
        check_fields(self)
        if self.width % 2:
            raise ValueError(f"width: got {self.width}, expected an even width of 2 or more")


BiasConfig = AlibiConfig | T5Config | RelativeSinusoidConfig
KINDS: dict[str, type[BiasConfig]] = {kind.kind: kind for kind in (AlibiConfig, T5Config, RelativeSinusoidConfig)}


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

    borders = find(partial(_bound_log, towards=-np.inf))
    if borders == find(partial(_bound_log, towards=np.inf)):
        return borders
    torch = import_torch(f"bias: a T5 bias of {config.buckets} buckets to distance {config.max_distance}")
    return find(lambda ratio: float(torch.log(torch.tensor(ratio, dtype=torch.float32, device="cpu"))))


LESS_EXACT = (7, 47, 49)
"""Whole numbers up to 128 whose float32 logarithm in PyTorch is not the nearest one."""


def _bound_log(ratio: float, towards: float) -> float:
    """Return a bound of PyTorch's float32 logarithm, below it for -inf, above it for inf.

    Its error is less than one unit in the last place.
    """
    nearest = np.float32(math.log(ratio))
    is_nearest = ratio.is_integer() and ratio <= 128 and ratio not in LESS_EXACT
    error = float(nearest) - math.log(ratio)
    is_bound = is_nearest or not error or (error > 0) == (towards > 0)
    return float(nearest if is_bound else np.nextafter(nearest, np.float32(towards)))


def relative_frequencies(width: int) -> Floats:
    """Return the D/2 frequencies of relative sinusoids, float32 (Dai et al. 2019, section 3.3)."""
    return np.reciprocal(powers(10000, np.arange(0, width, 2, dtype=np.float32) / np.float32(width)))
