"""Rotary positions: offsets and rotation. The angles are compared with transformers in test_rotary_families.py."""

from dataclasses import replace
from typing import Any

import torch
from transformers.models.gpt_neox import modeling_gpt_neox

from preblock.models.modules.rotary_config import SCALINGS
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import CONFIGS, IDS, SIZES, assert_equal, read
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


def test_rotary_config_with_invalid_value_is_rejected() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("default", {"scaling": "ntk"}, "scaling: got 'ntk', expected default, linear, dynamic, yarn"),
        ("default", {"dim": 31}, "dim: got 31, expected an even width of 2 to 65536"),
        ("default", {"dim": 0}, "dim: got 0, expected an even width of 2 to 65536"),
        ("default", {"theta": 1.0}, "theta: got 1.0, expected more than 1"),
        ("default", {"factor": 2.0}, "factor: got 2.0, expected 0.0 with scaling 'default'"),
        ("linear", {"factor": 0.0}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ("linear", {"factor": float("inf")}, "factor: got inf, expected more than 0"),
        ("proportional", {"turning_pairs": 17}, "turning_pairs: got 17, expected 1 to 16"),
        ("dynamic", {"dim": 2}, "dim: got 2, expected 4"),
        ("yarn", {"attention_factor": 0.0}, "attention_factor: got 0.0"),
        ("yarn", {"beta_fast": 0.5}, "beta_fast: got 0.5, expected at"),
        ("llama3", {"high_freq_factor": 0.5}, "high_freq_factor: got 0.5, expected at least low_freq_factor, 1.0"),
        ("longrope", {"original_len": 1}, "original_len: got 1, expected 2 or more"),
        *(
            ("longrope", {"short_factor": factors}, f"short_factor: got {factors}, expected 16 numbers of more than 0")
            for factors in ((), (1.0,) * 15, (1.0,) * 15 + (0.0,))
        ),
    ]
    for scaling, changes, message in cases:
        assert message in rejection(ValueError, replace, CONFIGS[scaling], **changes), changes


def test_invalid_rope_config_is_rejected() -> None:
    cases: list[tuple[object, str]] = [
        ({"rope_type": "su"}, "rope_type: got 'su', expected default, linear"),
        ({"rope_type": "default", "mrope_section": [8]}, "got the key 'mrope_section', not known with rope_type 'def"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 9}, "got the key 'beta_fast', not known with rope_type"),
        ({"rope_type": "dynamic", "factor": 2.0, "length": 9}, "got the key 'length', not known"),
        ({"rope_type": "linear"}, "factor: got 0.0, expected more than 0 with scaling 'linear'"),
        ({"rope_type": "linear", "factor": "2"}, "factor: got '2', expected a number"),
        ({"rope_type": "longrope", "long_factor": 1.0}, "long_factor: got 1.0, expected a list of numbers"),
        ({"rope_type": "longrope", "long_factor": [1, "2"]}, "long_factor[1]: got '2', expected a number"),
        ({"rope_type": "given", "frequencies": [1.0]}, "rope_type: got 'given', expected default, linear"),
        ({"rope_type": "linear", "factor": True}, "factor: got True, expected a number"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 0}, "truncate: got 0, expected true or false"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 0}, "original_max_position_embeddings: got 0, e"),
        ("linear", "got 'linear', expected a JSON object"),
    ]
    for rope, message in cases:
        for key in ("rope_scaling", "rope_parameters"):
            assert message in rejection(ValueError, read, {**SIZES, key: rope}), (key, rope)


def test_invalid_head_count_is_rejected() -> None:
    for heads in (0, 257, "4", True):
        message = f"num_attention_heads: got {heads!r}, expected 1 to 256"
        assert message in rejection(ValueError, read, {**SIZES, "num_attention_heads": heads})
