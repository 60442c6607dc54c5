"""Rotation of queries and keys, against transformers."""

from typing import Any

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import CONFIGS, IDS, Layout, angles, assert_equal
from tests.models.rejections import rejection


@pytest.mark.parametrize("width", [32, 48])
def test_rotate_equals_transformers_llama_and_gpt_neox(width: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, width), torch.randn(2, 2, 5, width)
    for rows in (1, 2):
        cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=torch.arange(rows) + 100)
        library: Any = modeling_llama if width == 32 else modeling_gpt_neox
        expected = library.apply_rotary_pos_emb(query, key, cos, sin)
        assert_equal((rotate(query, cos, sin, "half"), rotate(key, cos, sin, "half")), expected)


@pytest.mark.parametrize("width", [32, 48])
def test_rotate_interleaved_equals_transformers_gptj(width: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, width)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=torch.tensor([0, 100]))
    sines, cosines = sin[..., :16], cos[..., :16]
    turned = modeling_gptj.apply_rotary_pos_emb(query[..., :32].transpose(1, 2), sines, cosines)
    expected = torch.cat((turned.transpose(1, 2), query[..., 32:]), dim=-1)
    assert torch.equal(rotate(query, cos, sin, "interleaved"), expected)


def test_rotate_keeps_query_dtype() -> None:
    query = torch.randn(2, 4, 5, 32, dtype=torch.bfloat16)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(query[:, 0])
    assert rotate(query, cos, sin).dtype == cos.dtype == torch.bfloat16


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotated_score_depends_only_on_distance(layout: Layout) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)
    positions = torch.arange(2000).unsqueeze(0)
    cos, sin = angles(RotaryEmbedding(CONFIGS["default"]), positions)
    queries = rotate(query.expand(1, 1, 2000, 32), cos, sin, layout)
    keys = rotate(key.expand(1, 1, 2000, 32), cos, sin, layout)
    scores = (queries[:, :, 70:] * keys[:, :, :-70]).sum(-1)
    assert (scores - scores[..., :1]).abs().max() < 1e-3
    assert (queries.norm(dim=-1) - query.norm()).abs().max() < 1e-6


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_gradient_rotates_back(layout: Layout) -> None:
    torch.manual_seed(0)
    query, weights = torch.randn(2, 4, 5, 40, requires_grad=True), torch.randn(2, 4, 5, 40)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=9)
    (rotate(query, cos, sin, layout) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    torch.testing.assert_close(query.grad, rotate(weights, cos, -sin, layout))


def test_invalid_arguments_of_rotate_are_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    query = torch.zeros(2, 1, 5, 32)
    expected = "layout: got 'pairs', expected 'half', 'interleaved'"
    assert rejection(ValueError, rotate, query, cos, sin, "pairs") == expected
    expected = "cos: got 32 columns, expected up to the width 16 of a head"
    assert rejection(ValueError, rotate, query[..., :16], cos, sin) == expected
