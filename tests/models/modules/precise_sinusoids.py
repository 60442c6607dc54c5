"""Sinusoids of arbitrary precision, by mpmath, and the distance of others from them."""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from preblock.models.modules.sinusoids import Sinusoid
from preblock.models.sinusoid_tables import POSITIONS

PRECISION = 160
"""Bits of every calculation in mpmath."""

WIDTHS_AND_BASES = pytest.mark.parametrize(
    ("d_model", "base"), [(512, 10000.0), (768, 10000.0), (48, 500.0), (10, 1e6), (6, 0.001)]
)
"""With a base less than 1, an angle advances by more than one turn per position."""


@lru_cache(maxsize=16)
def wavelengths(d_model: int, base: float) -> list[Any]:
    with mpmath.workprec(PRECISION):
        return [mpmath.power(base, mpmath.mpf(2 * pair) / d_model) for pair in range(d_model // 2)]


@lru_cache(maxsize=16)
def turns_per_position(d_model: int, base: float) -> list[int]:
    """Of every pair of columns, in units of 2^-128."""
    with mpmath.workprec(PRECISION):
        return [
            int(mpmath.nint(mpmath.ldexp(1 / (2 * mpmath.pi * wavelength), 128)))
            for wavelength in wavelengths(d_model, base)
        ]


def precise(position: int, pair: int, d_model: int, base: float = 10000.0) -> tuple[Any, Any]:
    """The sine and the cosine of one pair of columns by the formula of the paper."""
    with mpmath.workprec(PRECISION):
        angle = position / wavelengths(d_model, base)[pair]
        return mpmath.sin(angle), mpmath.cos(angle)


def units_off(found: float, exact: Any) -> float:
    """The distance of `found` from `exact`, in units in the last place of a float32 at `exact`."""
    with mpmath.workprec(PRECISION):
        if exact == 0:
            return 0.0 if found == 0 else math.inf
        return float(mpmath.ldexp(abs(found - exact), 24 - mpmath.frexp(exact)[1]))


def worst(places: Iterable[tuple[int, int]], d_model: int, base: float = 10000.0) -> float:
    """The largest distance from mpmath at the given places: position and pair of columns."""
    module, largest = Sinusoid(d_model, base), 0.0
    iterator = iter(places)
    while part := [place for _, place in zip(range(2048), iterator, strict=False)]:
        found = module(torch.tensor([position for position, _ in part])).tolist()
        for row, (position, pair) in zip(found, part, strict=True):
            for phase, exact in enumerate(precise(position, pair, d_model, base)):
                largest = max(largest, units_off(row[2 * pair + phase], exact))
    return largest


def bits(values: Tensor | NDArray[np.float32]) -> NDArray[np.int32]:
    return np.asarray(values).view(np.int32)


def powers_of_two_and_neighbours() -> list[int]:
    positions = {2**k + step for k in range(32) for step in (-1, 0, 1)}
    return sorted(position for position in positions if position < POSITIONS)


def closest_to_quarters(d_model: int, base: float) -> Iterator[tuple[int, int]]:
    """The places where an angle comes closer to a quarter, half or whole turn than at any position before.

    Continued fractions give them: the denominators of the convergents of quarters per position.
    """
    for pair, turns in enumerate(turns_per_position(d_model, base)):
        numerator, denominator = 4 * turns, 2**128
        before, position = 0, 1
        while position < POSITIONS:
            yield position, pair
            numerator, denominator = denominator, numerator % denominator
            before, position = position, before + position * (numerator // denominator)


def random_places(d_model: int, count: int) -> Iterator[tuple[int, int]]:
    random = np.random.default_rng(count)
    yield from zip(
        random.integers(0, POSITIONS, count).tolist(), random.integers(0, d_model // 2, count).tolist(), strict=True
    )
