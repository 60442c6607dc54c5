"""A front-end described in TOML: the same as the family it describes, or refused by name."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.grid import SinusoidalGridEncoding
from preblock.models.modules.sinusoids import sinusoid
from preblock.models.step_documents import from_document, to_document
from tests.models.checkpoints.toml_files import IDS, TABLES, TOKENS, describe

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


def test_described_steps_match_torch(tmp_path: Path) -> None:
    frontend = read_description(describe(tmp_path, ALL)).eval()
    types = torch.tensor([[0, 1, 0], [1, 1, 0]])
    x = TABLES["embed"][IDS] * 2.0 + TABLES["kinds"][types] + TABLES["places"][torch.arange(3) + 1]
    expected = F.layer_norm(x, (4,), TABLES["gain"], TABLES["shift"], 1e-5) @ TABLES["widen"].T
    torch.testing.assert_close(frontend(IDS, 0, types), expected)
    assert (frontend.config.max_len, frontend.config.family) == (8, "custom")


@pytest.mark.parametrize("weight", ["", 'weight = "gain"'])
def test_rms_norm_step_matches_torch(weight: str, tmp_path: Path) -> None:
    text = f'{TOKENS}\n[[steps]]\nkind = "rms_norm"\neps = 1e-5\n{weight}\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    expected = F.rms_norm(TABLES["embed"][IDS], (4,), TABLES["gain"] if weight else None, 1e-5)
    torch.testing.assert_close(frontend(IDS), expected)
    again = FrontEndConfig.from_document(frontend.config.to_document())
    assert FrontEnd(again).state_dict().keys() == frontend.state_dict().keys()


def test_exact_positions_step_needs_no_tensor(tmp_path: Path) -> None:
    text = TOKENS + '\n[[steps]]\nkind = "positions"\ntable = "exact"\nrows = 5\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    angle = torch.tensor([2.0, 0.02], dtype=torch.float64)
    expected = torch.stack((angle.sin(), angle.cos()), -1).flatten().float() + TABLES["embed"][3]
    torch.testing.assert_close(frontend(torch.tensor([[3]]), 2)[0, 0], expected)


def test_description_without_positions_has_no_max_len(tmp_path: Path) -> None:
    assert read_description(describe(tmp_path, TOKENS)).config.max_len is None
    assert read_description(describe(tmp_path, "max_len = 7\n" + TOKENS)).config.max_len == 7


def test_description_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    folder = describe(tmp_path, TOKENS)
    file = folder / "frontend.toml"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert read_description(folder).config.tokens.rows == 11


SINUSOIDS = TOKENS + '[[steps]]\nkind = "positions"\ntable = "tensor2tensor"\nrows = 16\n'
STEP = '\n[[steps]]\nkind = "{}"\n'
LEVELS = (
    TOKENS
    + STEP.format("levels")
    + """
[[steps.levels]]
input = "sentence"
weight = "places"

[[steps.levels]]
input = "word"
weight = "kinds"
"""
)


def test_levels_step_has_one_input_per_level(tmp_path: Path) -> None:
    frontend = read_description(describe(tmp_path, LEVELS)).eval()
    assert frontend.config.indices == {"sentence": 9, "word": 2}
    assert frontend.config.max_len is None
    sentence, word = torch.tensor([[8, 0, 3]]), torch.tensor([[1, 1, 0]])
    expected = TABLES["embed"][IDS] + (TABLES["places"][sentence] + TABLES["kinds"][word])
    assert torch.equal(frontend(IDS, indices={"sentence": sentence, "word": word}), expected)


def test_level_can_use_token_table(tmp_path: Path) -> None:
    text = LEVELS + '\n[[steps.levels]]\ninput = "topic"\ntable = "tokens"\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    assert frontend.config.indices == {"sentence": 9, "word": 2, "topic": 11}
    topic = torch.tensor([[10, 0, 3]])
    expected = TABLES["embed"][IDS] + (TABLES["places"][0] + TABLES["kinds"][0] + TABLES["embed"][topic])
    assert torch.equal(frontend(IDS, indices={"topic": topic}), expected)


def test_segments_step_can_rename_input_and_use_token_table(tmp_path: Path) -> None:
    text = TOKENS + STEP.format("segments") + 'input = "speaker"\nweight = "kinds"\n'
    text += STEP.format("segments") + 'table = "tokens"\nby = 2.0\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    assert frontend.config.indices == {"speaker": 2, "token_type_ids": 11}
    types = torch.tensor([[10, 0, 3], [1, 2, 3]])
    expected = TABLES["embed"][IDS] + TABLES["kinds"][types % 2] + TABLES["embed"][types] * 2.0
    assert torch.equal(frontend(IDS, 0, types, indices={"speaker": types % 2}), expected)


def test_hybrid_positions_are_limited_only_by_max_len(tmp_path: Path) -> None:
    text = TOKENS + STEP.format("positions") + 'table = "hybrid"\nweight = "places"\n'
    frontend = read_description(describe(tmp_path, text)).eval()
    assert frontend.config.max_len == 2**31
    found = frontend(IDS, 8)
    assert torch.equal(found[:, 0], TABLES["embed"][IDS[:, 0]] + TABLES["places"][8])
    assert torch.equal(found[:, 1:], TABLES["embed"][IDS[:, 1:]] + sinusoid(torch.tensor([9, 10]), 4))
    with pytest.raises(ValueError, match="exceeds the maximum length 20"):
        read_description(describe(tmp_path, "max_len = 20\n" + text))(IDS, 18)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('table = "exact"', SinusoidalGridEncoding(4, 3, 3)(torch.zeros((1, 9), dtype=torch.int64))[0]),
        ('weight = "places"', TABLES["places"]),
        (
            'table = "factorised"\nweight = "corner"\ncolumns = "corner"',
            (TABLES["corner"].unsqueeze(1) + TABLES["corner"]).flatten(0, 1),
        ),
    ],
)
def test_grid_positions_match_cells(tmp_path: Path, fields: str, expected: torch.Tensor) -> None:
    text = TOKENS + STEP.format("positions") + f"grid = [3, 3]\n{fields}\n"
    frontend = read_description(describe(tmp_path, text)).eval()
    assert frontend.config.max_len == 9
    ids = torch.arange(9).reshape(1, 9)
    assert torch.equal(frontend(ids), TABLES["embed"][ids] + expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (TOKENS + STEP.format(kind) + fields, message)
            for kind, fields, message in (
                ("positions", 'weight = "places"\ngrid = [3, 4]', "rows: got 9, expected 12, the cells of the grid"),
                ("positions", 'weight = "places"\ngrid = [0, 4]', "grid: got .0, 4., expected two numbers"),
                ("positions", 'weight = "places"\ngrid = 9', "grid: got 9, expected two numbers"),
                ("positions", 'table = "tensor2tensor"\nrows = 9\ngrid = [3, 3]', "expected none for a table 'tensor"),
                ("positions", 'table = "factorised"\nweight = "places"\ncolumns = "kinds"', "grid: got none"),
                ("positions", 'table = "factorised"\nweight = "kinds"\ngrid = [2, 2]', "named by positions.columns"),
                (
                    "positions",
                    'table = "factorised"\nweight = "places"\ncolumns = "kinds"\ngrid = [8, 2]',
                    "size mismatch for positions.rows",
                ),
                ("positions", 'table = "hybrid"\nrows = 9', "is named by positions.weight"),
                ("positions", 'table = "hybrid"\nweight = "places"\nfirst = 2', "counts and first: got 'slots' and 2"),
                ("segments", 'table = "other"\nweight = "kinds"', "segments.table: got 'other', expected own, tokens"),
                ("segments", 'input = "offset"\nweight = "kinds"', "input: got 'offset', expected small letters"),
                ("segments", 'input = "dtype"\nweight = "kinds"', "input: got 'dtype', expected small letters"),
                ("segments", 'input = "A b"\nweight = "kinds"', "input: got 'A b', expected small letters"),
                ("levels", "", "levels: .*missing"),
                ("levels", "levels = []", "levels: got none, expected one or more"),
                ("levels", "levels = [3]", "levels: got 3, expected tables with the fields of segments"),
                ("levels", "levels = 3", "levels: .*not iterable"),
                ("levels", '[[steps.levels]]\nkind = "norm"\neps = 1.0', "levels: got .*, expected tables"),
                ("levels", '[[steps.levels]]\ninput = "word"', "no tensor is named by levels.0.weight"),
                (
                    "levels",
                    '[[steps.levels]]\nweight = "kinds"\n[[steps.levels]]\nweight = "kinds"',
                    "input: got 'token_type_ids' 2 times, expected once",
                ),
                (
                    "project",
                    'weight = "widen"\n[[steps]]\nkind = "segments"\ntable = "tokens"',
                    "segments.table: got 'tokens', expected at a width of 4",
                ),
            )
        ),
        ("steps = 3", "steps: expected a list of tables"),
        ("", "steps: expected a list of tables"),
        ("max_len = [", "frontend.toml"),
        ("padding_idx = 1.5\n" + TOKENS, "padding_idx: got 1.5, expected an id"),
        (TOKENS + "[ngrams]\nwidth = 4\n", "ngrams is not known, expected are family"),
        ("width = 3\n" + TOKENS, "width is not known, expected are family, max_len"),
        (TOKENS + TOKENS, "2 of kind 'tokens'"),
        ('[[steps]]\nkind = "scale"\nby = 2.0\n', "no tensor is named by the first step"),
        (TOKENS + '[[steps]]\nkind = "rotate"\n', "kind: got 'rotate', expected tokens, scale"),
        (TOKENS + '[[steps]]\nkind = "norm"\n', "norm: .*eps"),
        (TOKENS + '[[steps]]\nkind = "rms_norm"\neps = "x"\n', "rms_norm.eps: got 'x', expected a finite"),
        (TOKENS + '[[steps]]\nkind = "rms_norm"\neps = -1\n', "rms_norm.eps: got -1, expected a finite number from 0"),
        (TOKENS + '[[steps]]\nkind = "norm"\neps = -1e-5\n', "norm.eps: got -1e-05, expected a finite number from 0"),
        (
            TOKENS + f'[[steps]]\nkind = "norm"\neps = 1{"0" * 400}\n',
            "norm.eps: got 10+, expected a finite number from 0",
        ),
        (TOKENS + '[[steps]]\nkind = "positions"\nweight = "elsewhere"\n', "no tensor elsewhere"),
        (TOKENS + '[[steps]]\nkind = "positions"\ntable = "round"\nrows = 4\n', "table: got 'round', expected learned"),
        (TOKENS + '[[steps]]\nkind = "norm"\neps = 1e-5\nweight = "places"\n', "size mismatch"),
        (
            TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "ids"\n',
            "first: got 0, expected 1 or more",
        ),
        (TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "foo"\n', "counts: got 'foo'"),
        (
            "max_len = 50\n" + TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\n',
            "max_len: got 50, expected 1 to 9",
        ),
        (TOKENS + '[[steps]]\nkind = "scale"\nby = "x"\n', "scale.by: got 'x', expected a number"),
        ("lookup = 2\n" + TOKENS, "lookup: got 2, expected 1 to 1"),
        ("lookup = 1.0\n" + TOKENS, "lookup: got 1.0, expected 1 to 1"),
        ("family = [1]\n" + TOKENS, "family: got .1., expected a text"),
        ('consumer_scales = "no"\n' + TOKENS, "consumer_scales: got 'no', expected true or false"),
        ('refused_ids = "3"\n' + TOKENS, "refused_ids: got '3', expected a list of token ids"),
        ("refused_ids = [5, -1]\n" + TOKENS, "refused_ids: got -1, expected ids from 0 to 10"),
        (SINUSOIDS + "zero_row = 16\n", "zero_row: got 16, expected 0 to 15"),
        (SINUSOIDS + "zero_row = 1.0\n", "positions.zero_row: got 1.0, expected a whole number"),
        (SINUSOIDS + "zero_row = true\n", "positions.zero_row: got True, expected a whole number"),
        ("refused_ids = [1.0]\n" + TOKENS, "refused_ids: got 1.0, expected ids from 0 to 10"),
        (
            TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\nzero_row = 1\n',
            "zero_row: got 1, expected none for a table 'learned'",
        ),
        (TOKENS + '[[steps]]\nkind = "scale"\nby = 2.0\ncast = "false"\n', "scale.cast: got 'false', expected a bool"),
        (TOKENS + '[[steps]]\nkind = "segments"\nweight = "kinds"\nneeded = 1\n', "segments.needed: got 1, expected a"),
        (
            TOKENS + '[[steps]]\nkind = "norm"\neps = 1e-5\nweight = { a = 1 }\n',
            "weight: got .'a': 1., expected the name",
        ),
        (TOKENS + '[[steps]]\nkind = "norm"\neps = 1e-5\nbias = [3]\n', "bias: got .3., expected the name of a tensor"),
        (TOKENS + f"[[rotary]]\ndim = 4\nscaling = 'linear'\nfactor = 1{'0' * 400}\n", "too large|too big"),
        (
            TOKENS + '[[steps]]\nkind = "positions"\nweight = "places"\ncounts = "ids"\nfirst = 1\n',
            "padding_idx: got none",
        ),
    ],
)
def test_unsupported_description_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_description(describe(tmp_path, text))


def test_steps_survive_document_round_trip(tmp_path: Path) -> None:
    config = read_description(describe(tmp_path, LEVELS)).config
    again = [from_document(json.loads(json.dumps(to_document(step)))) for step in config.steps]
    assert [to_document(step) for step in again] == [to_document(step) for step in config.steps]
    assert "places" not in json.dumps(config.to_document())
    assert FrontEnd(type(config).from_document(config.to_document())).config.indices == config.indices


def test_files_described_are_shards_of_named_tensors(tmp_path: Path) -> None:
    (tmp_path / "frontend.toml").write_text(LEVELS)
    assert files_described(tmp_path) == ["model.safetensors"]
    files = {name: f"{place}.safetensors" for place, name in enumerate(TABLES)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert files_described(tmp_path) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    (tmp_path / "frontend.toml").write_text("steps = 3")
    with pytest.raises(CheckpointError, match="steps: expected a list"):
        files_described(tmp_path)
