"""Sinusoids against arbitrary precision, by mpmath, and tables bit for bit those of the libraries."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.xlm import modeling_xlm

from preblock.models.modules.sinusoids import Sinusoid, sinusoid
from preblock.models.sinusoid_tables import POSITIONS, RECIPES, exact_sinusoids, library_table
from tests.models.rejections import rejection

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


@WIDTHS_AND_BASES
def test_critical_values_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    assert worst(closest_to_quarters(d_model, base), d_model, base) <= 0.501
    powers = powers_of_two_and_neighbours()
    places = ((position, pair) for pair in range(0, d_model // 2, 1 + d_model // 12) for position in powers)
    assert worst(places, d_model, base) <= 0.501
    assert worst(random_places(d_model, 1000), d_model, base) <= 0.501


def test_negative_positions_negate_only_sines() -> None:
    positions = torch.tensor([1, 5, 10**6, POSITIONS - 1])
    forwards, backwards = sinusoid(positions, 64), sinusoid(-positions, 64)
    assert torch.equal(backwards[:, 0::2], -forwards[:, 0::2])
    assert torch.equal(backwards[:, 1::2], forwards[:, 1::2])


@pytest.mark.parametrize("d_model", [1, 7])
def test_odd_width_is_zero_padded_on_request(d_model: int) -> None:
    found = sinusoid(torch.tensor([0, 1, 2**30]), d_model, pad_odd=True)
    assert found.shape == (3, d_model)
    assert (found[:, -1] == 0).all()
    for row, position in zip(found.tolist(), (0, 1, 2**30), strict=True):
        for pair in range(d_model // 2):
            for phase, exact in enumerate(precise(position, pair, d_model)):
                assert units_off(row[2 * pair + phase], exact) <= 0.501


def test_invalid_sinusoid_arguments_are_rejected() -> None:
    for d_model, expected in ((1, "an even width"), (7, "an even width"), (0, "1 or more"), (-2, "1 or more")):
        assert f"d_model: got {d_model}, expected {expected}" in rejection(ValueError, Sinusoid, d_model)
    for base in (0.0, -10.0, math.inf, math.nan):
        assert f"base: got {base}, expected finite numbers" in rejection(ValueError, Sinusoid, 8, base)
    for position in (2**31, -(2**31), 2**62, -(2**63)):
        message = f"positions: got {position}, expected -2147483647 to 2147483647"
        assert rejection(ValueError, sinusoid, torch.tensor([0, position]), 8) == message


@pytest.mark.parametrize(("width", "base"), [(64, 10000.0), (6, 0.001), (7, 500.0)])
def test_numpy_sinusoids_equal_module_bits(width: int, base: float) -> None:
    near, far = np.arange(-300, 3000), np.random.default_rng(1).integers(1 - POSITIONS, POSITIONS, 20_000)
    positions = np.concatenate((near, far, [1 - POSITIONS, POSITIONS - 1])).reshape(-1, 2)
    expected = sinusoid(torch.from_numpy(positions), width, base, pad_odd=True)
    assert np.array_equal(bits(exact_sinusoids(positions, width, base)), bits(expected))


def interleaved(rows: int, d_model: int) -> Tensor:
    table = torch.empty(rows, d_model)
    modeling_xlm.create_sinusoidal_embeddings(rows, d_model, table)  # type: ignore[no-untyped-call]
    return table


LIBRARY: dict[str, Callable[..., Tensor]] = {
    "pair_half": lambda rows, d_model: MarianSinusoidalPositionalEmbedding(rows, d_model).create_weight(),  # type: ignore[no-untyped-call]
    "pair_interleaved": interleaved,
    "pair_half_float32": lambda rows, d_model: positional_encoding(rows, d_model, torch.float32),  # type: ignore[no-untyped-call]
    "tensor2tensor": M2M100SinusoidalPositionalEmbedding.get_embedding,
}
"""What builds the table of a recipe in transformers."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_table_equals_library_bit_for_bit(recipe: str) -> None:
    for rows, d_model in ((1, 4), (2, 6), (50, 256), (514, 768), (3, 5), (300, 63)):
        found = library_table(recipe, rows, d_model)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.int32), bits(LIBRARY[recipe](rows, d_model))), (rows, d_model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_padding_row_is_zeroed(recipe: str) -> None:
    expected = library_table(recipe, 9, 8)
    with torch.device("meta"):
        assert np.array_equal(library_table(recipe, 9, 8), expected)
    expected[5] = 0
    assert np.array_equal(library_table(recipe, 9, 8, 5), expected)
    for zero_row in (-1, 9):
        message = f"zero_row: got {zero_row}, expected 0 to 8"
        assert rejection(ValueError, library_table, recipe, 9, 8, zero_row) == message
