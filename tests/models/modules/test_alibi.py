"""ALiBi, against the paper and the modules of transformers that use it."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from preblock.models.modules.alibi import AlibiBias, alibi_slopes

HEADS = pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 25, 32, 71, 112])
BLOOM, MPT = 3e-6, 1.5e-7
"""Allowed relative error of a slope or its product: these modules compute the powers in float32."""


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


def causal_weights(scores: Tensor, query_offset: int) -> Tensor:
    """Softmax over the keys up to each query."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(query_offset + 1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def test_alibi_slopes_of_8_and_16_heads_match_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.equal(alibi_slopes(16), torch.tensor([2 ** (-i / 2) for i in range(1, 17)]))


def test_alibi_slopes_of_3_and_12_heads_have_known_values() -> None:
    every_other = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert torch.equal(alibi_slopes(12), torch.cat((alibi_slopes(8), torch.tensor(every_other))))
    assert torch.equal(alibi_slopes(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))


@pytest.mark.parametrize("heads", [1, 4, 32, 128])
def test_alibi_slopes_match_mpmath_rounded_once(heads: int) -> None:
    with mpmath.workdps(40):
        exact = [float(mpmath.power(2, -8 * mpmath.mpf(i) / heads)) for i in range(1, heads + 1)]
    assert np.array_equal(alibi_slopes(heads).numpy(), np.array(exact, dtype=np.float32))


@pytest.mark.parametrize("first", [1, 65, 129])
def test_alibi_slopes_match_transformers_for_every_head_count(first: int) -> None:
    for heads in range(first, first + 64):
        slopes = alibi_slopes(heads)
        torch.testing.assert_close(slopes, bloom(heads, ones(2))[:, 0, 1], rtol=BLOOM, atol=0)
        torch.testing.assert_close(slopes, -mpt(heads, 2)[:, 0, 0], rtol=MPT, atol=0)


@HEADS
def test_alibi_bias_is_negative_slope_times_distance(heads: int) -> None:
    bias, slopes = AlibiBias(heads)(3, 2, 6)[0], alibi_slopes(heads)
    distances = torch.tensor([[3, 2, 1, 0, -1, -2], [4, 3, 2, 1, 0, -1]])
    assert torch.equal(bias, torch.stack([-slope * distances for slope in slopes]))


@HEADS
def test_alibi_bias_at_first_key_matches_bloom(heads: int) -> None:
    torch.testing.assert_close(AlibiBias(heads)(0, 1, 500)[0], bloom(heads, ones(500)), rtol=BLOOM, atol=0)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_alibi_bias_of_power_of_two_heads_equals_bloom_bits(heads: int) -> None:
    assert torch.equal(AlibiBias(heads)(0, 1, 500)[0], bloom(heads, ones(500)))


@HEADS
def test_alibi_bias_at_last_key_matches_mpt(heads: int) -> None:
    torch.testing.assert_close(AlibiBias(heads)(499, 1, 500)[0], mpt(heads, 500), rtol=MPT, atol=0)


@HEADS
def test_alibi_bias_matches_falcon_within_bfloat16(heads: int) -> None:
    torch.testing.assert_close(AlibiBias(heads)(0, 1, 200)[0], falcon(heads, ones(200)), rtol=2**-7, atol=0)


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"anchor": "key"}, "anchor: got 'key', expected query, first, last"),
        ({"recipe": "fast"}, "recipe: got 'fast', expected exact, float32_powers, float32_reciprocals"),
        ({"arithmetic": "float16"}, "arithmetic: got 'float16', expected float32, bfloat16"),
        ({"divisor": 0}, "divisor: got 0, expected a number above 0"),
    ],
)
def test_alibi_with_invalid_parameter_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlibiBias(4, **values)


@HEADS
@pytest.mark.parametrize(
    "row", [lambda heads: bloom(heads, ones(40)), lambda heads: mpt(heads, 40)], ids=["bloom", "mpt"]
)
def test_alibi_bias_differs_from_published_row_by_constant(heads: int, row: Callable[[int], Tensor]) -> None:
    torch.manual_seed(0)
    published, scores = row(heads), torch.randn(heads, 30, 40)
    bias = AlibiBias(heads)(10, 30, 40)[0]
    difference = bias - published
    assert (difference.amax(-1) - difference.amin(-1)).max() < 1e-5
    assert difference.abs().max() > 2**-8
    torch.testing.assert_close(
        causal_weights(scores + bias, 10), causal_weights(scores + published, 10), rtol=1e-5, atol=1e-7
    )


def test_alibi_weights_with_left_padding_match_bloom() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    scores = torch.randn(12, 5, 5)
    expected = causal_weights(scores + bloom(12, mask)[..., 3:], 0)
    torch.testing.assert_close(causal_weights(scores + AlibiBias(12)(3, 5, 8)[0, ..., 3:], 0), expected)


def test_alibi_steps_with_past_keys_match_whole() -> None:
    module = AlibiBias(12)
    steps = [module(start, 3, 12) for start in range(0, 12, 3)]
    assert torch.equal(torch.cat(steps, dim=2), module(0, 12, 12))


def test_alibi_accepts_zero_queries_or_keys() -> None:
    assert AlibiBias(3)(4, 0, 4).shape == (1, 3, 0, 4)
    assert AlibiBias(3)(4, 2, 0).shape == (1, 3, 2, 0)


def test_alibi_has_no_parameters_or_state() -> None:
    assert list(AlibiBias(12).parameters()) == []
    assert AlibiBias(12).state_dict() == {}


def test_alibi_bias_stays_float32_after_dtype_change() -> None:
    expected = AlibiBias(12)(0, 9, 9)
    for dtype in (torch.bfloat16, torch.float64):
        found = AlibiBias(12).to(dtype)(0, 9, 9)
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


def test_alibi_on_meta_device_is_filled_by_to_empty() -> None:
    module = AlibiBias(12).to("meta")
    assert module(0, 9, 9).device.type == "meta"
    assert torch.equal(module.to_empty(device="cpu")(0, 9, 9), AlibiBias(12)(0, 9, 9))


def test_alibi_with_zero_heads_is_rejected() -> None:
    with pytest.raises(ValueError, match="heads: got 0, expected 1 or more"):
        AlibiBias(0)


@pytest.mark.parametrize(
    ("lengths", "name"), [((-1, 2, 3), "query_offset"), ((0, -1, 3), "query_length"), ((0, 2, -1), "key_length")]
)
def test_alibi_with_negative_length_is_rejected(lengths: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got -1, expected 0 or more"):
        AlibiBias(2)(*lengths)


def test_alibi_graph_matches_module() -> None:
    module = AlibiBias(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(
            module,
            (5, 3, 8),
            dynamo=True,
            opset_version=20,
            dynamic_shapes=(torch.export.Dim.DYNAMIC,) * 3,
            verbose=False,
        )
    assert program is not None
    graph = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = ("query_offset", "query_length", "key_length")
    for lengths in ((5, 3, 8), (0, 1, 1), (0, 9, 9), (2000, 1, 2001), (100, 300, 400), (4, 0, 4), (4, 2, 0)):
        inputs = {name: np.array(length) for name, length in zip(names, lengths, strict=True)}
        assert np.array_equal(graph.run(None, inputs)[0], module(*lengths).numpy())
