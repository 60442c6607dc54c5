"""Rotary outputs described in TOML."""

import json
import math
from pathlib import Path

import pytest
import torch

from preblock.models.checkpoints.toml_config import read_description
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from tests.models.checkpoints.toml_files import IDS, TOKENS, describe

ROTARY = (
    TOKENS
    + """
[[rotary]]
name = "near"
dim = 4
layout = "interleaved"

[[rotary]]
dim = 2
theta = 500
scaling = "longrope"
factor = 4
original_len = 8
length = 16
short_factor = [1]
long_factor = [2.5]
"""
)


def test_described_rotary_outputs_are_built(tmp_path: Path) -> None:
    frontend = read_description(describe(tmp_path, ROTARY))
    assert frontend.signature.rotary == {
        "rotary_cos_near": 4,
        "rotary_sin_near": 4,
        "rotary_cos": 2,
        "rotary_sin": 2,
    }
    assert frontend.signature.rotary_len == 16
    assert [output.layout for output in frontend.config.rotary] == ["interleaved", "half"]
    angle = torch.arange(3) / 2.5
    cos, factor = frontend.rotary_outputs(IDS)["rotary_cos"], (1 + math.log(4) / math.log(8)) ** 0.5
    torch.testing.assert_close(cos, (angle.cos() * factor).reshape(1, 3, 1).expand(1, 3, 2))
    document = json.loads(json.dumps(frontend.config.to_document()))
    assert FrontEndConfig.from_document(document).rotary == frontend.config.rotary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim = 3", "dim: got 3, expected an even width"),
        ("dim = 4.0", "dim: got 4.0, expected a whole number"),
        ("theta = 5.0", r"rotary.dim: got none"),
        ('dim = 4\ntheta = "5"', r"rotary.theta: got '5', expected a number"),
        ("dim = 4\ntheta = true", r"rotary.theta: got True, expected a number"),
        ("dim = 4\ntruncate = 1", r"rotary.truncate: got 1, expected true or false"),
        ('dim = 4\nscaling = "given"\nfrequencies = 1.0', r"rotary.frequencies: got 1.0, expected numbers"),
        ('dim = 4\nscaling = "given"\nfrequencies = [1, "2"]', r"rotary.frequencies: got .*, expected numbers"),
        ('dim = 4\nlayout = "pairs"', r"rotary.layout: got 'pairs', expected 'half', 'interleaved'"),
        ('dim = 4\nangles = "bfloat16"', "angles: got 'bfloat16', expected float32, float64"),
        ('dim = 4\nname = "a-b"', r"rotary.name: got 'a-b', expected lower-case"),
        ("dim = 4\nbase = 3", r"rotary.base is not known, expected are name, layout, form, dtype, axes, dim, theta"),
        ("dim = 4\n[[rotary]]\ndim = 4", r"rotary: got the names \['', ''\], expected each once"),
    ],
)
def test_unsupported_rotary_output_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_description(describe(tmp_path, f"{TOKENS}\n[[rotary]]\n{text}\n"))


def test_rotary_as_single_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rotary: expected a list of tables, \[\[rotary\]\]"):
        read_description(describe(tmp_path, f"{TOKENS}\n[rotary]\ndim = 4\n"))


def test_rotary_with_mask_counted_positions_is_rejected(tmp_path: Path) -> None:
    positions = '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "mask"\nfirst = 1\n'
    with pytest.raises(CheckpointError, match="rotary: got positions that count 'mask', expected 'slots'"):
        read_description(describe(tmp_path, f"{TOKENS}\n{positions}\n[[rotary]]\ndim = 4\n"))
