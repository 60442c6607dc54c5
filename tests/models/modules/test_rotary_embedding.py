"""Rotary positions: offsets and rotation. The angles are compared with transformers in test_rotary_families.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox

from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import (
    CONFIGS,
    IDS,
    SIZES,
    assert_equal,
    read,
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scaling": "ntk"}, "scaling: got 'ntk', expected default, linear, dynamic, yarn, llama3, longrope"),
        ({"dim": 31}, "dim: got 31, expected an even width of 2 to 65536"),
        ({"dim": 32.0}, "dim: got 32.0, expected a whole number"),
        ({"dim": 0}, "dim: got 0, expected an even width of 2 to 65536"),
        ({"theta": 1.0}, "theta: got 1.0, expected more than 1"),
        ({"factor": 2.0}, "factor: got 2.0, expected 0.0 with scaling 'default'"),
        ({"scaling": "linear"}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ({"scaling": "linear", "factor": float("nan")}, "factor: got nan, expected more than 0"),
        ({"scaling": "linear", "factor": float("inf")}, "factor: got inf, expected more than 0"),
        ({"scaling": "linear", "factor": 2.0, "truncate": False}, "truncate: got False, expected True"),
        ({"scaling": "proportional", "factor": 1.0}, "turning_pairs: got 0, expected more than 0 with scaling 'prop"),
        ({"scaling": "proportional", "factor": 1.0, "turning_pairs": 17}, "turning_pairs: got 17, expected 1 to 16"),
        ({"scaling": "proportional", "factor": 1.0, "turning_pairs": 2.5}, "turning_pairs: got 2.5, expected a whole"),
        ({"turning_pairs": 3}, "turning_pairs: got 3, expected 0 with scaling 'default'"),
        ({"scaling": "dynamic", "factor": 2.0, "original_len": 9}, "length: got 0, expected more than 0"),
        ({"scaling": "dynamic", "factor": 2.0, "original_len": 9, "length": 9, "dim": 2}, "dim: got 2, expected 4"),
        ({"scaling": "yarn", "factor": 2.0, "original_len": 9, "attention_factor": 0.0}, "attention_factor: got 0.0"),
        ({"scaling": "yarn", "factor": 2.0, "original_len": 9, "beta_fast": 0.5}, "beta_fast: got 0.5, expected at"),
    ],
)
def test_rotary_config_with_invalid_value_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryConfig(**{"dim": 32, **changes})


def test_rotary_config_changed_to_invalid_value_is_rejected() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("llama3", {"high_freq_factor": 0.5}, "high_freq_factor: got 0.5, expected at least low_freq_factor, 1.0"),
        ("longrope", {"original_len": 1}, "original_len: got 1, expected 2 or more"),
        *(
            ("longrope", {"short_factor": factors}, f"short_factor: got {factors}, expected 16 numbers of more than 0")
            for factors in ((), (1.0,) * 15, (1.0,) * 15 + (0.0,))
        ),
    ]
    for scaling, changes, message in cases:
        assert message in rejection(ValueError, replace, CONFIGS[scaling], **changes), changes


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "su"}, "rope_type: got 'su', expected default, linear"),
        ({"type": "mrope", "mrope_section": [8, 12, 12]}, "rope_type: got 'mrope', expected default, linear"),
        ({"rope_type": "default", "mrope_section": [8]}, "got the key 'mrope_section', not known with rope_type 'def"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 9}, "got the key 'beta_fast', not known with rope_type"),
        ({"rope_type": "default", "length": 9}, "got the key 'length', not known"),
        ({"rope_type": "dynamic", "factor": 2.0, "length": 9}, "got the key 'length', not known"),
        ({"rope_type": "linear"}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ({"rope_type": "linear", "factor": "2"}, "factor: got '2', expected a number"),
        ({"rope_type": "longrope", "long_factor": 1.0}, "long_factor: got 1.0, expected a list of numbers"),
        ({"rope_type": "longrope", "long_factor": [1, "2"]}, r"long_factor\[1\]: got '2', expected a number"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' depends on the length .*, and none was given"),
        ({"rope_type": "given", "frequencies": [1.0]}, "rope_type: got 'given', expected default, linear"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, exp"),
        ({"rope_type": "linear", "factor": True}, "factor: got True, expected a number"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 0}, "truncate: got 0, expected true or false"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings: got 0, e"),
        ("linear", "got 'linear', expected a JSON object"),
    ],
)
def test_invalid_rope_config_is_rejected(rope: object, message: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            read({**SIZES, key: rope})


def test_invalid_head_count_is_rejected() -> None:
    for heads in (0, 257, "4", True):
        message = f"num_attention_heads: got {heads!r}, expected 1 to 256"
        assert message in rejection(ValueError, read, {**SIZES, "num_attention_heads": heads})
