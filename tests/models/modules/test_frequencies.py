"""Frequencies, slopes and borders, bit for bit those of torch.

The oracles are the formulas of transformers, written with torch. The bits are those of AVX-512: torch computes powers
by another function at the end of a tensor, and AVX2 has shorter blocks. So each oracle divides its tensors itself.
"""

import math
import subprocess
import sys
from bisect import bisect_left
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from preblock.models.float32_powers import BLOCK, powers, vector_powers
from preblock.models.modules.bias import (
    LESS_EXACT,
    SLOPES,
    AlibiConfig,
    T5Config,
    alibi_slopes,
    relative_frequencies,
    t5_borders,
)
from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig, rotary_frequencies
from tests.models.checkpoints.rotary_models import ROTARY

CAPABILITY = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(CAPABILITY not in ("AVX512", "AVX2"), reason="torch computes powers by libm alone")

THETAS = sorted(
    {default for row in ROTARY.values() for _, default in row.thetas.values()}
    | {2.5e5, 1.0e7, 1.1e7, 2.0e7, 2.5e7, 1.0e8, 1.0e9, 1.0e11, 10000, 26000.0, 31768.3}
)
"""Of the rows, and of published files."""


def published_powers(base: float, exponents: Tensor) -> Tensor:
    """Return base ** exponents, in blocks of AVX-512."""
    blocks = len(exponents) // BLOCK * BLOCK
    rest = [base ** exponents[place : place + 1] for place in range(blocks, len(exponents))]
    return torch.cat((base ** exponents[:blocks], *rest))


def published_frequencies(c: RotaryConfig) -> Tensor:
    """Return the frequencies in the steps of transformers."""
    exponents = torch.arange(0, c.dim, 2, dtype=torch.float32) / c.dim
    plain = 1.0 / published_powers(c.theta, exponents)
    match c.scaling:
        case "linear":
            return plain / c.factor
        case "dynamic" if c.length > c.original_len:
            ratio = c.factor * torch.tensor(c.length) / c.original_len - (c.factor - 1)
            return 1.0 / published_powers(c.theta * ratio ** (c.dim / (c.dim - 2)), exponents)  # type: ignore[arg-type]
        case "yarn":
            return published_yarn(c, published_powers(c.theta, exponents))
        case "llama3":
            return published_llama3(c, plain)
        case "longrope":
            factors = torch.tensor(c.long_factor if c.length > c.original_len else c.short_factor, dtype=torch.float32)
            return 1.0 / (factors * published_powers(c.theta, exponents))
        case "proportional":
            turning = 1.0 / published_powers(c.theta, exponents[: c.turning_pairs]) / c.factor
            return torch.nn.functional.pad(turning, (0, c.dim // 2 - c.turning_pairs))
        case _:
            return plain


def published_yarn(c: RotaryConfig, wavelength: Tensor) -> Tensor:
    def correction(turns: float) -> float:
        return (c.dim * math.log(c.original_len / (turns * 2 * math.pi))) / (2 * math.log(c.theta))

    low, high = correction(c.beta_fast), correction(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(c.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (c.factor * wavelength) * (1 - (1 - ramp)) + 1.0 / wavelength * (1 - ramp)


def published_llama3(c: RotaryConfig, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    slow, fast = c.original_len / c.low_freq_factor, c.original_len / c.high_freq_factor
    scaled = torch.where(wavelength > slow, plain / c.factor, plain)
    smooth = (c.original_len / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    smoothed = (1 - smooth) * plain / c.factor + smooth * plain
    return torch.where(~(wavelength < fast) * ~(wavelength > slow), smoothed, scaled)


def random_config(scaling: str, draw: np.random.Generator) -> RotaryConfig:
    dim = int(draw.integers(2, 257)) * 2
    values: dict[str, Any] = {"dim": dim, "theta": float(np.exp(draw.uniform(0.1, 21))), "scaling": scaling}
    original = int(draw.integers(2, 200_000))
    choices: dict[str, Any] = {
        "factor": float(draw.uniform(0.3, 80)),
        "original_len": original,
        "length": int(draw.integers(1, 3 * original)),
        "beta_fast": float(draw.uniform(4, 64)),
        "beta_slow": float(draw.uniform(0.1, 4)),
        "truncate": bool(draw.integers(2)),
        "low_freq_factor": float(draw.uniform(0.5, 2)),
        "high_freq_factor": float(draw.uniform(2, 8)),
        "short_factor": tuple(draw.uniform(1, 9, dim // 2).tolist()),
        "long_factor": tuple(draw.uniform(1, 60, dim // 2).tolist()),
        "turning_pairs": int(draw.integers(1, dim // 2 + 1)),
    }
    row = SCALINGS[scaling]
    return RotaryConfig(**values, **{name: choices[name] for name in (*row.needs, *row.takes) if name in choices})


def assert_bits(found: np.ndarray[Any, Any], expected: Tensor, setting: object) -> None:
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.int32), expected.numpy().view(np.int32)), setting


def test_powers_of_random_thetas_have_bits_of_torch() -> None:
    """10^5 settings of eight powers each: SLEEF computes each number alone."""
    draw = np.random.default_rng(54)
    thetas = np.exp(draw.uniform(0, 25, 100_000)).astype(np.float32).repeat(8)
    pairs = draw.integers(8, 257, (100_000, 1))
    places = (np.arange(8) + draw.integers(0, pairs - 7)).astype(np.float32) / pairs.astype(np.float32)
    exponents = places.ravel().astype(np.float32)
    # Too few numbers at once for several threads: each would end with numbers outside of blocks.
    pieces = [slice(begin, begin + 2**14) for begin in range(0, len(thetas), 2**14)]
    bases, powers_ = torch.from_numpy(thetas), torch.from_numpy(exponents)
    expected = torch.cat([torch.pow(bases[piece], powers_[piece]) for piece in pieces])
    assert_bits(vector_powers(thetas, exponents), expected, None)


def test_frequencies_of_known_thetas_have_bits_of_torch() -> None:
    """Each theta of the rotary table and of published files, with widths to 512."""
    for theta, dim in product(THETAS, (*range(4, 194, 4), 256, 512)):
        config = RotaryConfig(dim=dim, theta=theta)
        assert_bits(rotary_frequencies(config), published_frequencies(config), config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        assert CAPABILITY != "AVX512" or torch.equal(published_powers(theta, exponents), theta**exponents)


@pytest.mark.parametrize("scaling", sorted({*SCALINGS} - {"given"}))
def test_scaled_frequencies_have_bits_of_torch(scaling: str) -> None:
    draw = np.random.default_rng(len(scaling))
    for _ in range(300):
        config = random_config(scaling, draw)
        assert_bits(rotary_frequencies(config), published_frequencies(config), config)


def test_float64_frequencies_give_same_angles_as_torch() -> None:
    """Powers in float64 may differ in the last bit; RoFormer rounds cosines and sines to float32."""
    positions = np.arange(0, 20_000, 7)[:, None]
    for dim in (16, 64, 128):
        found = rotary_frequencies(RotaryConfig(dim=dim, angles="float64"))
        expected = (1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-15)
        for function in (np.cos, np.sin):
            ours, theirs = (function(positions * part).astype(np.float32) for part in (found, expected))
            assert np.array_equal(ours, theirs)


def test_given_and_infinite_numbers_pass_as_in_torch() -> None:
    given = (0.1, 3.0, 1e-30)
    kinds: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
    for angles in kinds:
        config = RotaryConfig(dim=6, scaling="given", frequencies=given, angles=angles)
        assert rotary_frequencies(config).tolist() == np.array(given, dtype=angles).tolist()
    assert rotary_frequencies(RotaryConfig(dim=6, theta=1e300)).tolist() == [1, 0, 0]
    assert powers(1e300, np.array([0, 1], np.float32)).tolist() == (1e300 ** torch.tensor([0.0, 1.0])).tolist()


def published_slopes(recipe: str, heads: int) -> Tensor:
    lower = 2 ** math.floor(math.log2(heads))
    if recipe == "exact":
        slopes = [2 ** (-8 * place / lower) for place in range(1, lower + 1)]
        slopes += [2 ** (-8 * place / (2 * lower)) for place in range(1, 2 * lower, 2)]
        return torch.tensor(slopes[:heads])
    if recipe == "float32_powers":
        first = published_powers(float(np.float32(2 ** (-8 / lower))), torch.arange(1.0, 1 + lower))
        between = torch.arange(1.0, 1 + 2 * (heads - lower), 2)
        return torch.cat((first, published_powers(float(np.float32(2 ** (-4 / lower))), between)))
    higher = 2 ** math.ceil(math.log2(heads))
    slopes_of_higher = 1.0 / published_powers(2, torch.arange(1.0, higher + 1) * (8 / higher))
    return slopes_of_higher if higher == heads else torch.cat((slopes_of_higher[1::2], slopes_of_higher[::2]))[:heads]


@pytest.mark.parametrize("recipe", SLOPES)
def test_alibi_slopes_have_bits_of_torch(recipe: str) -> None:
    for heads in range(1, 300):
        expected = published_slopes(recipe, heads)
        assert_bits(alibi_slopes(AlibiConfig(heads=heads, recipe=recipe)), expected, heads)
        rounded = alibi_slopes(AlibiConfig(heads=heads, recipe=recipe, arithmetic="bfloat16"))
        assert_bits(rounded, expected.to(torch.bfloat16).to(torch.float32), heads)


def test_relative_frequencies_have_bits_of_torch() -> None:
    for width in range(2, 2050, 2):
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        assert_bits(relative_frequencies(width), 1.0 / published_powers(10000, exponents), width)


def test_logarithms_of_torch_are_within_expected_bounds() -> None:
    found = torch.log(torch.arange(1, 129, dtype=torch.float32)).numpy()
    nearest = np.array([math.log(number) for number in range(1, 129)]).astype(np.float32)
    assert tuple((np.flatnonzero(found != nearest) + 1).tolist()) == LESS_EXACT
    ratios = torch.cat([torch.arange(exact, 3000, dtype=torch.float32) / exact for exact in range(1, 65)])
    exact_logarithms = np.log(ratios.numpy().astype(np.float64))
    errors = np.abs(torch.log(ratios).numpy() - exact_logarithms)
    assert (errors <= np.spacing(exact_logarithms.astype(np.float32))).all()


def published_borders(config: T5Config) -> list[int]:
    one_way = config.buckets // (2 if config.bidirectional else 1)
    exact = one_way // 2
    distance = torch.arange(config.max_distance + 1)
    log = torch.log(distance.clamp(min=exact).to(torch.float32) / exact)
    grown = exact + (log / math.log(config.max_distance / exact) * (one_way - exact)).to(torch.int64)
    buckets = torch.where(distance < exact, distance, grown.clamp(max=one_way - 1)).tolist()
    return [bisect_left(buckets, bucket) for bucket in range(1, one_way)]


def test_t5_borders_equal_torch() -> None:
    draw = np.random.default_rng(5)
    drawn = zip(draw.integers(2, 129, 150).tolist(), draw.integers(65, 3000, 150).tolist(), strict=True)
    settings = [*product((8, 16, 32, 64, 128), (33, 64, 100, 128, 200, 256, 512, 800, 1024)), *drawn]
    for (buckets, max_distance), bidirectional in product(settings, (False, True)):
        if not bidirectional or (buckets % 2 == 0 and buckets > 2):
            if max_distance <= buckets // 2:
                continue
            config = T5Config(heads=1, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
            assert t5_borders(config) == published_borders(config), config


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from preblock.models.modules.bias import T5Config, t5_borders
from preblock.models.sinusoid_tables import RECIPES, library_table
print(t5_borders(T5Config(heads=1, buckets=32, max_distance=128, bidirectional=True))[-3:])
for call in (
    *(lambda name=name: library_table(name, 3, 8).shape for name in RECIPES),
    lambda: t5_borders(T5Config(heads=1, buckets=32, max_distance=100, bidirectional=False)),
):
    try:
        print(call())
    except ImportError as error:
        print(error)
"""


def test_numbers_need_no_torch_or_say_so() -> None:
    hint = "needs torch: pip install 'preblock[torch]'"
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "[46, 64, 91]",
        "(3, 8)",
        "(3, 8)",
        f"table: the sinusoid recipe 'pair_half_float32' {hint}",
        f"table: the sinusoid recipe 'tensor2tensor' {hint}",
        f"bias: a T5 bias of 32 buckets to distance 100 {hint}",
    ], done.stderr
