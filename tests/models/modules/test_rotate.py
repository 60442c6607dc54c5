"""Rotation of queries and keys, against transformers."""

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import CONFIGS, IDS, Layout, angles, assert_equal


@pytest.mark.parametrize("rows", [1, 2])
def test_rotate_equals_transformers_llama(rows: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 32), torch.randn(2, 2, 5, 32)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=torch.arange(rows) + 100)
    assert cos.shape == (rows, 5, 32)
    expected = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert_equal((rotate(query, cos, sin, "half"), rotate(key, cos, sin, "half")), expected)


def test_rotate_partial_head_equals_gpt_neox() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 48), torch.randn(2, 4, 5, 48)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=100)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(query, key, cos, sin)  # type: ignore[no-untyped-call]
    assert_equal((rotate(query, cos, sin, "half"), rotate(key, cos, sin, "half")), expected)
    assert torch.equal(expected[0][..., 32:], query[..., 32:])


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


def test_rotate_interleaved_equals_complex_multiplication() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 50, 32, dtype=torch.float64)
    angle = torch.outer(torch.arange(50).double(), 10000.0 ** (-torch.arange(16).double() / 16))
    turned = torch.view_as_complex(query.reshape(1, 2, 50, 16, 2)) * torch.polar(torch.ones_like(angle), angle)
    cos, sin = RotaryEmbedding(CONFIGS["default"])(torch.zeros((1, 50), dtype=torch.int64))
    assert (rotate(query, cos, sin, "interleaved") - torch.view_as_real(turned).flatten(-2)).abs().max() < 2e-5


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


def test_rotate_unknown_layout_is_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    with pytest.raises(ValueError, match="layout: got 'pairs', expected 'half', 'interleaved'"):
        rotate(torch.zeros(2, 1, 5, 32), cos, sin, "pairs")  # type: ignore[arg-type]


def test_rotate_head_narrower_than_angles_is_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    with pytest.raises(ValueError, match="cos: got 32 columns, expected up to the width 16 of a head"):
        rotate(torch.zeros(2, 1, 5, 16), cos, sin)
