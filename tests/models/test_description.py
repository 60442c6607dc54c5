"""A front-end described in TOML: the same as the family it describes, or refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from incipit.models.checkpoint import CheckpointError
from incipit.models.description import read_description

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
