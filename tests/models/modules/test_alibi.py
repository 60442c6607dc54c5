"""ALiBi, against the paper and the modules of transformers that use it. The slopes are in test_frequencies.py."""

import math

import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from preblock.models.modules.alibi import AlibiBias
from tests.models.rejections import rejection

HEADS = (1, 2, 3, 12, 32, 71)


def test_alibi_bias_is_negative_slope_times_distance() -> None:
    distances = torch.tensor([[3, 2, 1, 0, -1, -2], [4, 3, 2, 1, 0, -1]])
    for heads in HEADS:
        module = AlibiBias(heads)
        expected = torch.stack([-slope * distances for slope in module.slopes])
        assert torch.equal(module(3, 2, 6)[0], expected), heads


def test_alibi_variants_match_transformers_bit_for_bit() -> None:
    mask = torch.ones((1, 1000), dtype=torch.int64)
    for heads in HEADS:
        bloom = modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)
        mpt = build_mpt_alibi_tensor(heads, 1000)  # type: ignore[no-untyped-call]
        falcon = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)
        for module, row in (
            (AlibiBias(heads, "first", "float32_powers"), bloom),
            (AlibiBias(heads, "last", "float32_reciprocals"), mpt),
            (AlibiBias(heads, "first", "float32_powers", "bfloat16"), falcon),
            (AlibiBias(heads, "first", "float32_powers", "bfloat16", math.sqrt(80)), falcon / math.sqrt(80)),
        ):
            assert torch.equal(module(7, 2, 1000)[0], row.expand(-1, 2, -1)), (heads, module)


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
