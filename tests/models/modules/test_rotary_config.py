"""Invalid rotary configurations."""

from dataclasses import replace
from typing import Any

import pytest

from preblock.models.modules.rotary_config import RotaryConfig
from tests.models.modules.published_rotary import CONFIGS, SIZES, read
from tests.models.rejections import rejection


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
