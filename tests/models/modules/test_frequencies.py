"""Powers, frequencies and borders, bit for bit those of torch. Scaled frequencies: test_rotary_families.py.

The bits are those of AVX-512: torch computes powers by another function at the end of a tensor, and AVX2 has shorter
blocks. So the oracle of powers divides its tensors itself.
"""

import subprocess
import sys
from bisect import bisect_left
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from preblock.models.float32_powers import BLOCK, powers, vector_powers
from preblock.models.modules.bias import LESS_EXACT, T5Config, relative_frequencies, t5_borders
from preblock.models.modules.rotary_config import RotaryConfig, rotary_frequencies
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
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        expected = published_powers(theta, exponents)
        assert_bits(rotary_frequencies(RotaryConfig(dim=dim, theta=theta)), 1.0 / expected, (theta, dim))
        assert CAPABILITY != "AVX512" or torch.equal(expected, theta**exponents)


def test_given_and_infinite_numbers_pass_as_in_torch() -> None:
    given = (0.1, 3.0, 1e-30)
    kinds: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
    for angles in kinds:
        config = RotaryConfig(dim=6, scaling="given", frequencies=given, angles=angles)
        assert rotary_frequencies(config).tolist() == np.array(given, dtype=angles).tolist()
    assert rotary_frequencies(RotaryConfig(dim=6, theta=1e300)).tolist() == [1, 0, 0]
    assert powers(1e300, np.array([0, 1], np.float32)).tolist() == (1e300 ** torch.tensor([0.0, 1.0])).tolist()


def test_relative_frequencies_have_bits_of_torch() -> None:
    for width in range(2, 2050, 2):
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        assert_bits(relative_frequencies(width), 1.0 / published_powers(10000, exponents), width)


def test_logarithms_of_torch_are_within_expected_bounds() -> None:
    numbers = torch.arange(1, 129, dtype=torch.float32)
    differ = torch.log(numbers) != torch.log(numbers.double()).float()
    assert tuple(numbers[differ].tolist()) == LESS_EXACT
    ratios = torch.cat([torch.arange(exact, 3000, dtype=torch.float32) / exact for exact in range(1, 65)])
    exact_logarithms = np.log(ratios.numpy().astype(np.float64))
    errors = np.abs(torch.log(ratios).numpy() - exact_logarithms)
    assert (errors <= np.spacing(exact_logarithms.astype(np.float32))).all()


def test_t5_borders_equal_transformers() -> None:
    draw = np.random.default_rng(5)
    drawn = zip(draw.integers(2, 129, 150).tolist(), draw.integers(65, 3000, 150).tolist(), strict=True)
    settings = [*product((8, 16, 32, 64, 128), (33, 64, 100, 128, 200, 256, 512, 800, 1024)), *drawn]
    for (buckets, max_distance), bidirectional in product(settings, (False, True)):
        if max_distance > buckets // 2 and not (bidirectional and (buckets % 2 or buckets == 2)):
            config = T5Config(heads=1, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
            past = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
                -torch.arange(max_distance + 1), bidirectional, buckets, max_distance
            ).tolist()
            count = buckets // 2 if bidirectional else buckets
            assert t5_borders(config) == [bisect_left(past, bucket) for bucket in range(1, count)], config


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from preblock.models.modules.bias import LESS_EXACT, T5Config, t5_borders
print(t5_borders(T5Config(heads=1, buckets=32, max_distance=128, bidirectional=True))[-3:])
t5_borders(T5Config(heads=1, buckets=32, max_distance=100, bidirectional=False))
"""


def test_t5_borders_need_no_torch_or_say_so() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout == "[46, 64, 91]\n"
    assert "bias: a T5 bias of 32 buckets to distance 100 needs torch: pip install 'preblock[torch]'" in done.stderr
