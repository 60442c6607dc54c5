"""ALiBi, against the paper and the modules of transformers that use it."""

import math

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from preblock.models.modules.alibi import AlibiBias
from tests.models.rejections import rejection

HEADS = pytest.mark.parametrize("heads", [1, 2, 3, 12, 32, 71])
BLOOM, MPT = 3e-6, 1.5e-7
"""Allowed relative error of a slope or its product: these modules compute the powers in float32."""


def slopes_of(heads: int) -> Tensor:
    return AlibiBias(heads).slopes


def bloom(heads: int, mask: Tensor) -> Tensor:
    """Return bloom's bias of each key, float32 (H, 1, K)."""
    row: Tensor = modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)
    return row


def mpt(heads: int, key_length: int) -> Tensor:
    """Return mpt's bias of each key, float32 (H, 1, K)."""
    row: Tensor = build_mpt_alibi_tensor(heads, key_length)  # type: ignore[no-untyped-call]
    return row


def falcon(heads: int, mask: Tensor) -> Tensor:
    """Return falcon's bias of each key before the scores are divided, float32 (H, 1, K)."""
    row: Tensor = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)
    return row


def ones(key_length: int) -> Tensor:
    return torch.ones((1, key_length), dtype=torch.int64)


def test_alibi_slopes_of_few_heads_have_known_values() -> None:
    assert slopes_of(8).tolist() == [2.0**-i for i in range(1, 9)]
    every_other = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert torch.equal(slopes_of(12), torch.cat((slopes_of(8), torch.tensor(every_other))))
    assert torch.equal(slopes_of(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))


@pytest.mark.parametrize("heads", [1, 4, 128])
def test_alibi_slopes_match_mpmath_rounded_once(heads: int) -> None:
    with mpmath.workdps(40):
        exact = [float(mpmath.power(2, -8 * mpmath.mpf(i) / heads)) for i in range(1, heads + 1)]
    assert np.array_equal(slopes_of(heads).numpy(), np.array(exact, dtype=np.float32))


def test_alibi_slopes_match_transformers_for_every_head_count() -> None:
    for heads in range(1, 130):
        slopes = slopes_of(heads)
        torch.testing.assert_close(slopes, bloom(heads, ones(2))[:, 0, 1], rtol=BLOOM, atol=0)
        torch.testing.assert_close(slopes, -mpt(heads, 2)[:, 0, 0], rtol=MPT, atol=0)


@HEADS
def test_alibi_bias_is_negative_slope_times_distance(heads: int) -> None:
    bias, slopes = AlibiBias(heads)(3, 2, 6)[0], slopes_of(heads)
    distances = torch.tensor([[3, 2, 1, 0, -1, -2], [4, 3, 2, 1, 0, -1]])
    assert torch.equal(bias, torch.stack([-slope * distances for slope in slopes]))


@HEADS
def test_alibi_variants_match_transformers_bit_for_bit(heads: int) -> None:
    forms = {
        AlibiBias(heads, "first", "float32_powers"): bloom(heads, ones(1000)),
        AlibiBias(heads, "last", "float32_reciprocals"): mpt(heads, 1000),
        AlibiBias(heads, "first", "float32_powers", "bfloat16"): falcon(heads, ones(1000)),
        AlibiBias(heads, "first", "float32_powers", "bfloat16", math.sqrt(80)): falcon(heads, ones(1000))
        / math.sqrt(80),
    }
    for module, row in forms.items():
        assert torch.equal(module(7, 2, 1000)[0], row.expand(-1, 2, -1))


def test_alibi_is_no_state_and_stays_float32() -> None:
    module, expected = AlibiBias(12), AlibiBias(12)(0, 9, 9)
    assert (list(module.parameters()), module.state_dict()) == ([], {})
    for dtype in (torch.bfloat16, torch.float64):
        torch.testing.assert_close(AlibiBias(12).to(dtype)(0, 9, 9), expected, rtol=0, atol=0)
    assert module.to("meta")(0, 9, 9).device.type == "meta"
    assert torch.equal(module.to_empty(device="cpu")(0, 9, 9), expected)


def test_invalid_alibi_arguments_are_rejected() -> None:
    for values, message in (
        ({"heads": 0}, "heads: got 0, expected 1 or more"),
        ({"anchor": "key"}, "anchor: got 'key', expected query, first, last"),
        ({"recipe": "fast"}, "recipe: got 'fast', expected exact, float32_powers, float32_reciprocals"),
        ({"arithmetic": "float16"}, "arithmetic: got 'float16', expected float32, bfloat16"),
        ({"divisor": 0}, "divisor: got 0, expected a number above 0"),
    ):
        assert rejection(ValueError, AlibiBias, **{"heads": 4} | values) == message
    for lengths, name in (((-1, 2, 3), "query_offset"), ((0, -1, 3), "query_length"), ((0, 2, -1), "key_length")):
        for anchor in ("query", "first"):
            assert rejection(ValueError, AlibiBias(2, anchor), *lengths) == f"{name}: got -1, expected 0 or more"
