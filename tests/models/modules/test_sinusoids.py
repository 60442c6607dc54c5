"""Exact sinusoids against arbitrary precision."""

import math

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from preblock.models.modules.sinusoids import Sinusoid, sinusoid
from preblock.models.sinusoid_tables import COSINE, POSITIONS, SINE, exact_sinusoids
from tests.models.modules.precise_sinusoids import (
    PRECISION,
    WIDTHS_AND_BASES,
    bits,
    closest_to_quarters,
    powers_of_two_and_neighbours,
    precise,
    random_places,
    units_off,
    worst,
)
from tests.models.rejections import rejection


@WIDTHS_AND_BASES
def test_critical_values_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    assert worst(closest_to_quarters(d_model, base), d_model, base) <= 0.501
    powers = powers_of_two_and_neighbours()
    places = ((position, pair) for pair in range(0, d_model // 2, 1 + d_model // 12) for position in powers)
    assert worst(places, d_model, base) <= 0.501
    assert worst(random_places(d_model, 1000), d_model, base) <= 0.501


@pytest.mark.parametrize(("name", "factor"), [("sin", SINE), ("cos", COSINE)])
def test_polynomials_are_accurate_to_54_bits(name: str, factor: tuple[float, ...]) -> None:
    with mpmath.workprec(PRECISION):
        for step in range(1, 1001):
            turn = (mpmath.mpf(1) / 8 + mpmath.mpf(2) ** -14) * step / 1000
            value = mpmath.polyval(list(reversed(factor)), turn * turn) * (turn if name == "sin" else 1)
            assert abs(value / getattr(mpmath, name)(2 * mpmath.pi * turn) - 1) < 2**-54


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
