"""A front-end described in TOML: the same as the family it describes, or refused by name."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from incipit.models.checkpoint import CheckpointError
from incipit.models.description import read_description
from incipit.models.frontend import FrontEndConfig

TABLES = {
    "embed": torch.randn(11, 4, generator=torch.Generator().manual_seed(1)),
    "places": torch.randn(9, 4, generator=torch.Generator().manual_seed(2)),
    "kinds": torch.randn(2, 4, generator=torch.Generator().manual_seed(3)),
    "gain": torch.randn(4, generator=torch.Generator().manual_seed(4)),
    "shift": torch.randn(4, generator=torch.Generator().manual_seed(5)),
    "widen": torch.randn(6, 4, generator=torch.Generator().manual_seed(6)),
    "unused": torch.zeros(1),
}
TOKENS = '[[steps]]\nkind = "tokens"\nweight = "embed"\n'
ALL = (
    TOKENS
    + """
[[steps]]
kind = "scale"
by = 2.0

[[steps]]
kind = "segments"
weight = "kinds"

[[steps]]
kind = "positions"
weight = "places"
first = 1

[[steps]]
kind = "norm"
eps = 1e-5
weight = "gain"
bias = "shift"

[[steps]]
kind = "project"
weight = "widen"
"""
)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def describe(folder: Path, text: str) -> Path:
    (folder / "frontend.toml").write_text(text)
    save_file(TABLES, folder / "model.safetensors")
    return folder


def test_every_kind_of_step_does_what_it_says(tmp_path: Path) -> None:
    frontend = read_description(describe(tmp_path, ALL)).eval()
    types = torch.tensor([[0, 1, 0], [1, 1, 0]])
    x = TABLES["embed"][IDS] * 2.0 + TABLES["kinds"][types] + TABLES["places"][torch.arange(3) + 1]
    expected = F.layer_norm(x, (4,), TABLES["gain"], TABLES["shift"], 1e-5) @ TABLES["widen"].T
    torch.testing.assert_close(frontend(IDS, 0, types), expected)
    assert (frontend.config.max_len, frontend.config.family) == (8, "custom")


def test_sinusoids_need_no_tensor(tmp_path: Path) -> None:
    text = TOKENS + '\n[[steps]]\nkind = "positions"\ntable = "exact"\nrows = 5\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    angle = torch.tensor([2.0, 0.02], dtype=torch.float64)
    expected = torch.stack((angle.sin(), angle.cos()), -1).flatten().float() + TABLES["embed"][3]
    torch.testing.assert_close(frontend(torch.tensor([[3]]), 2)[0, 0], expected)


def test_without_positions_nothing_limits_the_length(tmp_path: Path) -> None:
    assert read_description(describe(tmp_path, TOKENS)).config.max_len is None
    assert read_description(describe(tmp_path, "max_len = 7\n" + TOKENS)).config.max_len == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3", "steps: allowed is a list of tables"),
        ("", "steps: allowed is a list of tables"),
        ("max_len = [", "frontend.toml"),
        ("width = 3\n" + TOKENS, "width is not known, allowed are family, max_len"),
        (TOKENS + TOKENS, "2 of kind 'tokens'"),
        ('[[steps]]\nkind = "scale"\nby = 2.0\n', "no tensor is named by the first step"),
        (TOKENS + '[[steps]]\nkind = "rotate"\n', "kind: got 'rotate', allowed tokens, scale"),
        (TOKENS + '[[steps]]\nkind = "norm"\n', "norm: .*eps"),
        (TOKENS + '[[steps]]\nkind = "positions"\nweight = "elsewhere"\n', "no tensor elsewhere"),
        (TOKENS + '[[steps]]\nkind = "positions"\ntable = "round"\nrows = 4\n', "table: got 'round', allowed learned"),
        (TOKENS + '[[steps]]\nkind = "norm"\neps = 1e-5\nweight = "places"\n', "size mismatch"),
        (
            TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "ids"\n',
            "first: got 0, allowed 1 or more",
        ),
        (TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "foo"\n', "counts: got 'foo'"),
        (
            "max_len = 50\n" + TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\n',
            "max_len: got 50, allowed 1 to 9",
        ),
        (TOKENS + '[[steps]]\nkind = "scale"\nby = "x"\n', "scale.by: got 'x', allowed a number"),
        ("lookup = 2\n" + TOKENS, "lookup: got 2, allowed 1 to 1"),
        (
            TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "ids"\nfirst = 1\n',
            "padding_idx: got none",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_description(describe(tmp_path, text))


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


def test_rotary_outputs_can_be_described(tmp_path: Path) -> None:
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


def test_a_front_end_without_rotary_says_nothing_of_it(tmp_path: Path) -> None:
    document = read_description(describe(tmp_path, TOKENS)).config.to_document()
    assert not {"rotary", "no_rotary"} & set(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim = 3", "dim: got 3, allowed an even width"),
        ("dim = 4.0", "dim: got 4.0, allowed a whole number"),
        ("theta = 5.0", r"rotary.dim: got none"),
        ('dim = 4\ntheta = "5"', r"rotary.theta: got '5', allowed a number"),
        ("dim = 4\ntheta = true", r"rotary.theta: got True, allowed a number"),
        ("dim = 4\ntruncate = 1", r"rotary.truncate: got 1, allowed true or false"),
        ('dim = 4\nscaling = "given"\nfrequencies = 1.0', r"rotary.frequencies: got 1.0, allowed numbers"),
        ('dim = 4\nscaling = "given"\nfrequencies = [1, "2"]', r"rotary.frequencies: got .*, allowed numbers"),
        ('dim = 4\nlayout = "pairs"', r"rotary.layout: got 'pairs', allowed 'half', 'interleaved'"),
        ('dim = 4\nangles = "bfloat16"', "angles: got 'bfloat16', allowed float32, float64"),
        ('dim = 4\nname = "a-b"', r"rotary.name: got 'a-b', allowed lower-case"),
        ("dim = 4\nbase = 3", r"rotary.base is not known, allowed are name, layout, dim, theta"),
        ("dim = 4\n[[rotary]]\ndim = 4", r"rotary: got the names \['', ''\], allowed each once"),
    ],
)
def test_a_rotary_output_that_is_not_understood_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_description(describe(tmp_path, f"{TOKENS}\n[[rotary]]\n{text}\n"))


def test_rotary_is_a_list_of_tables(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rotary: allowed is a list of tables, \[\[rotary\]\]"):
        read_description(describe(tmp_path, f"{TOKENS}\n[rotary]\ndim = 4\n"))


def test_rotary_and_positions_that_skip_do_not_go_together(tmp_path: Path) -> None:
    positions = '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "mask"\nfirst = 1\n'
    with pytest.raises(CheckpointError, match="rotary: got positions that count 'mask', allowed 'slots'"):
        read_description(describe(tmp_path, f"{TOKENS}\n{positions}\n[[rotary]]\ndim = 4\n"))
