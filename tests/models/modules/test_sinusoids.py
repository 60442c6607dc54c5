"""Exact sinusoids against arbitrary precision."""

import math

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from preblock.models.modules.sinusoids import COSINE, POSITIONS, SINE, Sinusoid, sinusoid
from tests.models.modules.precise_sinusoids import (
    PRECISION,
    WIDTHS_AND_BASES,
    bits,
    closest_to_quarters,
    powers_of_two_and_neighbours,
    precise,
    random_places,
    reference,
    units_off,
    units_off_reference,
    worst,
)


@WIDTHS_AND_BASES
def test_powers_of_two_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    pairs = range(0, d_model // 2, 1 + d_model // 100)
    assert worst(((p, pair) for p in powers_of_two_and_neighbours() for pair in pairs), d_model, base) <= 0.501


@WIDTHS_AND_BASES
def test_powers_of_two_equal_reference_in_every_column(d_model: int, base: float) -> None:
    positions = np.array(powers_of_two_and_neighbours())[1:]
    found = Sinusoid(d_model, base)(torch.from_numpy(positions)).numpy()
    for pair in range(d_model // 2):
        pairs = np.full(len(positions), pair)
        assert all((off <= 0.501).all() for off in units_off_reference(found, positions, pairs, d_model, base)), pair


@WIDTHS_AND_BASES
def test_smallest_values_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    assert worst(closest_to_quarters(d_model, base), d_model, base) <= 0.501


@pytest.mark.parametrize("d_model", [32, 512, 768])
def test_random_values_equal_mpmath_rounded_once(d_model: int) -> None:
    assert worst(random_places(d_model, 3_000), d_model) <= 0.501


def test_fast_reference_equals_mpmath() -> None:
    places = [*random_places(512, 2000), *closest_to_quarters(512, 10000.0)]
    positions, pairs = np.array(places).T
    sines, cosines = reference(positions, pairs, 512)
    for place, *values in zip(places, sines, cosines, strict=True):
        for found, exact in zip(values, precise(*place, 512), strict=True):
            with mpmath.workprec(PRECISION):
                parts = float(found), float(found - float(found))
                assert abs(mpmath.fsum(parts) / exact - 1) < 2**-50, place


def test_float64_angle_is_inaccurate_for_small_values() -> None:
    places = list(closest_to_quarters(512, 10000.0))
    off = []
    for position, pair in places:
        angle = position / 10000.0 ** (2 * pair / 512)
        for found, exact in zip((math.sin(angle), math.cos(angle)), precise(position, pair, 512), strict=True):
            off.append(units_off(float(np.float32(found)), exact))
    assert max(off) > 1000


@pytest.mark.parametrize(("name", "factor"), [("sin", SINE), ("cos", COSINE)])
def test_polynomials_are_accurate_to_54_bits(name: str, factor: tuple[float, ...]) -> None:
    with mpmath.workprec(PRECISION):
        for step in range(1, 1001):
            turn = (mpmath.mpf(1) / 8 + mpmath.mpf(2) ** -14) * step / 1000
            value = mpmath.polyval(list(reversed(factor)), turn * turn) * (turn if name == "sin" else 1)
            assert abs(value / getattr(mpmath, name)(2 * mpmath.pi * turn) - 1) < 2**-54


def test_value_is_independent_of_its_batch() -> None:
    module, positions = Sinusoid(30), torch.randint(0, POSITIONS, (40, 25), generator=torch.Generator().manual_seed(0))
    rows = [module(position) for position in positions.flatten()]
    assert np.array_equal(bits(torch.stack(rows).reshape(40, 25, 30)), bits(module(positions)))


def test_negative_positions_negate_only_sines() -> None:
    positions = torch.tensor([1, 5, 10**6, POSITIONS - 1])
    forwards, backwards = sinusoid(positions, 64), sinusoid(-positions, 64)
    assert torch.equal(backwards[:, 0::2], -forwards[:, 0::2])
    assert torch.equal(backwards[:, 1::2], forwards[:, 1::2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_positions_may_have_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = sinusoid(torch.full(shape, 7, dtype=dtype), 8)
    assert found.shape == (*shape, 8)
    assert torch.equal(found, sinusoid(torch.tensor(7), 8).expand(*shape, 8))


def test_module_cast_does_not_round_constants() -> None:
    positions = torch.tensor([3, 10**6])
    assert torch.equal(Sinusoid(64).to(torch.bfloat16)(positions), Sinusoid(64)(positions))


def test_sinusoid_created_on_meta_device_has_constants() -> None:
    with torch.device("meta"):
        module = Sinusoid(64)
    assert torch.equal(module(torch.tensor([3])), Sinusoid(64)(torch.tensor([3])))


def test_sinusoid_has_no_parameters_or_state() -> None:
    assert Sinusoid(8).state_dict() == {}
    assert list(Sinusoid(8).parameters()) == []


@pytest.mark.parametrize("d_model", [1, 7])
def test_odd_width_is_rejected_or_zero_padded(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected an even width"):
        Sinusoid(d_model)
    found = sinusoid(torch.tensor([0, 1, 2**30]), d_model, pad_odd=True)
    assert found.shape == (3, d_model)
    assert (found[:, -1] == 0).all()
    for row, position in zip(found.tolist(), (0, 1, 2**30), strict=True):
        for pair in range(d_model // 2):
            for phase, exact in enumerate(precise(position, pair, d_model)):
                assert units_off(row[2 * pair + phase], exact) <= 0.501


@pytest.mark.parametrize("d_model", [0, -2])
def test_width_below_one_is_rejected(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected 1 or more"):
        Sinusoid(d_model)


@pytest.mark.parametrize("base", [0.0, -10.0, math.inf, math.nan])
def test_non_positive_or_non_finite_base_is_rejected(base: float) -> None:
    with pytest.raises(ValueError, match=f"base: got {base}, expected finite numbers greater than 0"):
        Sinusoid(8, base)


@pytest.mark.parametrize("position", [2**31, -(2**31), 2**62, -(2**63)])
def test_position_over_31_bits_is_rejected(position: int) -> None:
    with pytest.raises(ValueError, match=f"positions: got {position}, expected -2147483647 to 2147483647"):
        sinusoid(torch.tensor([0, position]), 8)
