"""A front-end described in TOML: the same as the family it describes, or refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend import FrontEnd
from tests.models.rejections import rejection

SHAPES: dict[str, tuple[int, ...]] = {"embed": (11, 4), "places": (9, 4), "kinds": (2, 4), "gain": (4,), "shift": (4,)}
SHAPES |= {"widen": (6, 4), "unused": (1,)}
RANDOM = torch.Generator().manual_seed(1)
TABLES = {name: torch.randn(shape, generator=RANDOM) for name, shape in SHAPES.items()}
TOKENS = '[[steps]]\nkind = "tokens"\nweight = "embed"\n'
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
STEP = '\n[[steps]]\nkind = "{}"\n'
ALL = (
    ("scale", "by = 2.0"),
    ("segments", 'weight = "kinds"'),
    ("positions", 'weight = "places"\nfirst = 1'),
    ("rms_norm", "eps = 1e-5"),
    ("rms_norm", 'eps = 1e-5\nweight = "gain"'),
    ("norm", 'eps = 1e-5\nweight = "gain"\nbias = "shift"'),
    ("project", 'weight = "widen"'),
)


def describe(folder: Path, text: str) -> Path:
    (folder / "frontend.toml").write_text(text)
    save_file(TABLES, folder / "model.safetensors")
    return folder


def test_described_steps_match_torch(tmp_path: Path) -> None:
    text = TOKENS + "".join(STEP.format(kind) + fields for kind, fields in ALL)
    frontend = FrontEnd.from_data(read_description(describe(tmp_path, text))).eval()
    types = torch.tensor([[0, 1, 0], [1, 1, 0]])
    x = TABLES["embed"][IDS] * 2.0 + TABLES["kinds"][types] + TABLES["places"][torch.arange(3) + 1]
    x = F.rms_norm(F.rms_norm(x, (4,), None, 1e-5), (4,), TABLES["gain"], 1e-5)
    expected = F.layer_norm(x, (4,), TABLES["gain"], TABLES["shift"], 1e-5) @ TABLES["widen"].T
    torch.testing.assert_close(frontend(IDS, 0, types), expected)
    assert (frontend.config.max_len, frontend.config.family) == (8, "custom")


def test_unstated_max_len_is_that_of_positions(tmp_path: Path) -> None:
    assert read_description(describe(tmp_path, TOKENS)).config.max_len is None
    for fields, limit in (
        ('table = "hybrid"\nweight = "places"', 2**31),
        ('table = "exact"\nrows = 5', 5),
        ('table = "exact"\ngrid = [3, 3]', 9),
    ):
        text = TOKENS + STEP.format("positions") + fields + "\n"
        assert read_description(describe(tmp_path, text)).config.max_len == limit
    file = describe(tmp_path, "max_len = 7\n" + TOKENS) / "frontend.toml"
    file.write_text(file.read_text(), encoding="utf-8-sig")  # with a byte order mark
    config = read_description(tmp_path).config
    assert (config.max_len, config.tokens.rows) == (7, 11)


PLACES = 'weight = "places"'
NORM = "eps = 1e-5"
INVALID_STEPS: dict[str, list[tuple[str, str]]] = {
    "positions": [
        (f"{PLACES}\ngrid = [3, 4]", "rows: got 9, expected 12, the cells of the grid"),
        (f"{PLACES}\ngrid = [-3, -3]", "grid: got .-3, -3., expected two numbers"),
        (f"{PLACES}\ngrid = 9", "grid: got 9, expected two numbers"),
        ('table = "exact"\ngrid = [1048576, 1048576]', "rows: got 1099511627776, expected at most"),
        ('table = "tensor2tensor"\nrows = 9\ngrid = [3, 3]', "expected none for a table 'tensor"),
        (f'table = "factorised"\n{PLACES}\ncolumns = "kinds"', "grid: got none"),
        ('table = "factorised"\nweight = "kinds"\ngrid = [2, 2]', "named by positions.columns"),
        (f'table = "factorised"\n{PLACES}\ncolumns = "kinds"\ngrid = [8, 2]', "positions.rows.weight: got the shape"),
        ('table = "hybrid"\nrows = 9', "is named by positions.weight"),
        (f'table = "hybrid"\n{PLACES}\nfirst = 2', "counts and first: got 'slots' and 2"),
        ('weight = "elsewhere"', "no tensor elsewhere"),
        ('table = "round"\nrows = 4', "table: got 'round', expected learned"),
        (f'{PLACES}\ncounts = "ids"', "first: got 0, expected 1 or more"),
        (f'{PLACES}\ncounts = "ids"\nfirst = 1', "padding_idx: got none"),
        (f"{PLACES}\nzero_row = 1", "zero_row: got 1, expected none for a table 'learned'"),
        ('table = "tensor2tensor"\nrows = 16\nzero_row = true', "positions.zero_row: got True, expected a whole"),
    ],
    "segments": [
        ('table = "other"\nweight = "kinds"', "segments.table: got 'other', expected own, tokens"),
        ('input = "dtype"\nweight = "kinds"', "input: got 'dtype', expected small letters"),
        ('input = "rotary_cos"\nweight = "kinds"\n[[rotary]]\ndim = 4', "input: got 'rotary_cos', expected"),
        ('input = "A b"\nweight = "kinds"', "input: got 'A b', expected small letters"),
        ('weight = "kinds"\nneeded = 1', "segments.needed: got 1, expected true or false"),
    ],
    "levels": [
        ("", "levels.levels: got none, expected a value"),
        ("levels = []", "levels: got none, expected one or more"),
        ("levels = [3]", "levels: got 3, expected tables with the fields of segments"),
        ("levels = 3", "levels.levels: got 3, expected a list of tables"),
        ('[[steps.levels]]\nkind = "norm"\neps = 1.0', "levels: got .*, expected tables"),
        ('[[steps.levels]]\ninput = "word"', "no tensor is named by levels.0.weight"),
        ('[[steps.levels]]\nweight = "kinds"\n' * 2, "input: got 'token_type_ids' 2 times, expected once"),
    ],
    "project": [
        (
            'weight = "widen"\n[[steps]]\nkind = "segments"\ntable = "tokens"',
            "segments.table: got 'tokens', expected at a width of 4",
        ),
    ],
    "rotate": [("", "kind: got 'rotate', expected tokens, scale")],
    "norm": [
        ("", "norm.eps: got none, expected a value"),
        ("eps = -1e-5", "norm.eps: got -1e-05, expected a finite number from 0"),
        (f"eps = 1{'0' * 400}", "norm.eps: got 10+, expected a finite number from 0"),
        (f"{NORM}\n{PLACES}", "norm.weight: got the shape"),
        (f"{NORM}\nweight = {{ a = 1 }}", "weight: got .'a': 1., expected the name"),
        (f"{NORM}\nbias = [3]", "bias: got .3., expected the name of a tensor"),
    ],
    "rms_norm": [
        ("eps = -1", "rms_norm.eps: got -1, expected a finite number from 0"),
    ],
    "scale": [
        ('by = "x"', "scale.by: got 'x', expected a finite number"),
        ("by = 1e39", "scale.by: got 1e[+]39, expected a finite number within float32"),
        (f"by = 1{'0' * 30}", "scale.by: got 10+, expected at most"),
        ('by = 2.0\ncast = "false"', "scale.cast: got 'false', expected true or false"),
    ],
}


@pytest.mark.parametrize("kind", INVALID_STEPS)
def test_unsupported_step_is_rejected(kind: str, tmp_path: Path) -> None:
    for fields, message in INVALID_STEPS[kind]:
        folder = describe(tmp_path, TOKENS + STEP.format(kind) + fields + "\n")
        assert re.search(message, rejection(CheckpointError, read_description, folder)), fields


def test_unsupported_description_is_rejected(tmp_path: Path) -> None:
    positions = STEP.format("positions") + PLACES
    for text, message in (
        ("steps = 3", "steps: expected a list of tables"),
        ("", "steps: expected a list of tables"),
        ("max_len = [", "frontend.toml"),
        (STEP.format("scale") + "by = 2.0", "no tensor is named by the first step"),
        (TOKENS + TOKENS, "2 of kind 'tokens'"),
        (f"{TOKENS}[ngrams]\nwidth = 4", "ngrams is not known, expected are family"),
        (f"width = 3\n{TOKENS}", "width is not known, expected are family, max_len"),
        (f"padding_idx = 1.5\n{TOKENS}", "padding_idx: got 1.5, expected an id"),
        (f"max_len = 50\n{TOKENS}{positions}", "max_len: got 50, expected 1 to 9"),
        (f"lookup = 2\n{TOKENS}", "lookup: got 2, expected 1 to 1"),
        (f"lookup = 1.0\n{TOKENS}", "lookup: got 1.0, expected 1 to 1"),
        (
            f"lookup = 2\n{TOKENS}{positions}{STEP.format('scale')}by = 2.0",
            "lookup: got the steps tokens, positions",
        ),
        (f"dropout = 2\n{TOKENS}", "dropout: got 2, expected a number from 0 to 1"),
        (f"family = [1]\n{TOKENS}", "family: got .1., expected a text"),
        (f'consumer_scales = "no"\n{TOKENS}', "consumer_scales: got 'no', expected true or false"),
        (f'refused_ids = "3"\n{TOKENS}', "refused_ids: got '3', expected a list of token ids"),
        (f"refused_ids = [1.0]\n{TOKENS}", "refused_ids: got 1.0, expected ids from 0 to 10"),
        (f"refused_ids = [5, -1]\n{TOKENS}", "refused_ids: got -1, expected ids from 0 to 10"),
        (f"{TOKENS}[rotary]\ndim = 4", r"rotary: expected a list of tables, \[\[rotary\]\]"),
        (
            f'{TOKENS}{positions}\ncounts = "mask"\nfirst = 1\n[[rotary]]\ndim = 4',
            "rotary: got positions that count 'mask', expected 'slots'",
        ),
    ):
        found = rejection(CheckpointError, read_description, describe(tmp_path, text + "\n"))
        assert re.search(message, found), text


def test_unsupported_rotary_output_is_rejected(tmp_path: Path) -> None:
    for text, message in (
        ("dim = 4.0", "dim: got 4.0, expected a whole number"),
        ("theta = 5.0", "rotary.dim: got none"),
        ("dim = 4\ntruncate = 1", "rotary.truncate: got 1, expected true or false"),
        ('dim = 4\nscaling = "given"\nfrequencies = 1.0', "rotary.frequencies: got 1.0, expected numbers"),
        (f"dim = 4\nscaling = 'linear'\nfactor = 1{'0' * 400}", "rotary.factor: got 10+, expected at most"),
        (
            f"dim = 4\nscaling = 'dynamic'\nfactor = 2\noriginal_len = 4\nlength = 1{'0' * 30}",
            "rotary.length: got 10+",
        ),
        ("dim = 4\nscaling = 'dynamic'\nfactor = 1e300\noriginal_len = 4\nlength = 9", "rotary: got the frequency nan"),
        ("dim = 4\nscaling = 'yarn'\nfactor = 2\noriginal_len = 9\nbeta_slow = 1e-320", "beta_slow: got 1e-320"),
        ("dim = 4\nscaling = 'yarn'\nfactor = 2\noriginal_len = 9\nbeta_fast = 1e308", "beta_fast: got 1e.308"),
        ('dim = 4\nlayout = "pairs"', "rotary.layout: got 'pairs', expected half, interleaved"),
        ('dim = 4\nangles = "bfloat16"', "angles: got 'bfloat16', expected float32, float64"),
        ('dim = 4\nname = "a-b"', "rotary.name: got 'a-b', expected lower-case"),
        ("dim = 4\nbase = 3", "rotary.base is not known, expected are name, layout, form, dtype, axes, dim, theta"),
        ("dim = 4\n[[rotary]]\ndim = 4", r"rotary: got the names \['', ''\], expected each once"),
    ):
        found = rejection(CheckpointError, read_description, describe(tmp_path, f"{TOKENS}\n[[rotary]]\n{text}\n"))
        assert re.search(message, found), text


LEVEL = '\n[[steps.levels]]\ninput = "{}"\n{}\n'
LEVELS = TOKENS + STEP.format("levels") + LEVEL.format("sentence", 'weight = "places"')
LEVELS += LEVEL.format("word", 'weight = "kinds"')


def test_files_described_are_shards_of_named_tensors(tmp_path: Path) -> None:
    (tmp_path / "frontend.toml").write_text(LEVELS)
    assert files_described(tmp_path) == ["model.safetensors"]
    files = {name: f"{place}.safetensors" for place, name in enumerate(TABLES)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert files_described(tmp_path) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    (tmp_path / "frontend.toml").write_text("steps = 3")
    assert "steps: expected a list" in rejection(CheckpointError, files_described, tmp_path)
