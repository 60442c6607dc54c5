"""Rotary positions: offsets and rotation. The angles are compared with transformers in test_rotary_families.py."""

from dataclasses import replace
from typing import Any

import torch
from transformers.models.gpt_neox import modeling_gpt_neox

from preblock.models.modules.rotary_config import SCALINGS
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import (
    CONFIGS,
    IDS,
    assert_equal,
)
from tests.models.rejections import rejection


def test_offset_shifts_rotary_positions() -> None:
    assert set(CONFIGS) == set(SCALINGS)
    for config in CONFIGS.values():
        module = RotaryEmbedding(config)
        whole = module(torch.zeros((1, 50), dtype=torch.int64))
        # A row is independent of its neighbours, and of earlier calls.
        found = module(IDS, offset=torch.tensor([3, 100_000]))
        assert_equal(tuple(part[0] for part in found), tuple(part[0, 3:8] for part in whole))
        for given in ({"offset": 7}, {"position_ids": torch.arange(7, 12).unsqueeze(0)}):
            assert_equal(module(IDS, **given), (whole[0][:, 7:12], whole[1][:, 7:12]))


def test_invalid_rotary_position_is_rejected() -> None:
    for offset in (-1, torch.tensor([3, -1])):
        module = RotaryEmbedding(CONFIGS["default"])
        assert rejection(ValueError, module, IDS, offset=offset) == "offset: got -1, expected 0 or more"
    for scaling in ("dynamic", "longrope"):
        module = RotaryEmbedding(replace(CONFIGS[scaling], length=5000))
        module(IDS, offset=4995)
        assert rejection(ValueError, module, IDS, offset=4996) == "position: got 5000, expected 0 to 4999"
        ids = torch.tensor([[0, 1, 6000, 2, 3]])
        assert rejection(ValueError, module, IDS, position_ids=ids) == "position: got 6000, expected 0 to 4999"


def test_rotate_turns_first_columns_of_head() -> None:
    """The library's functions of whole heads, in each layout, are in `test_rotary_outputs.py`."""
    torch.manual_seed(0)
    library: Any = modeling_gpt_neox
    query, key = torch.randn(2, 4, 5, 48, requires_grad=True), torch.randn(2, 2, 5, 48)
    for offset in (torch.tensor([100]), torch.tensor([0, 100])):
        cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=offset)
        found = rotate(query, cos, sin), rotate(key, cos, sin)
        assert_equal(found, library.apply_rotary_pos_emb(query, key, cos, sin))
    weights = torch.randn(2, 4, 5, 48)
    (found[0] * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    torch.testing.assert_close(query.grad, rotate(weights, cos, -sin))
    assert rotate(query.to(torch.bfloat16), cos.to(torch.bfloat16), sin.to(torch.bfloat16)).dtype == torch.bfloat16


def test_invalid_arguments_of_rotate_are_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    query = torch.zeros(2, 1, 5, 32)
    expected = "layout: got 'pairs', expected 'half', 'interleaved'"
    assert rejection(ValueError, rotate, query, cos, sin, "pairs") == expected
    expected = "cos: got 32 columns, expected up to the width 16 of a head"
    assert rejection(ValueError, rotate, query[..., :16], cos, sin) == expected
