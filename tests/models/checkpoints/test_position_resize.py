"""Resized tables, against torch's and numpy's own interpolation."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.checkpoints.position_resize import (
    RESIZINGS,
    hybrid,
    interpolate,
    interpolate_positions,
    resize_positions,
    truncate,
)
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.embeddings import GridEmbedding, HybridEmbedding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding
from tests.families.library_models import save

D, M = 6, 10
LENGTHS = pytest.mark.parametrize("length", [M, M + 1, 2 * M - 1, 2 * M, 23, 1000])
NAMES = pytest.mark.parametrize("name", list(RESIZINGS))


@pytest.fixture
def table() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(M, D)


def test_resizings_have_expected_names() -> None:
    assert list(RESIZINGS) == ["truncate", "interpolate", "interpolate_positions", "hybrid"]


@LENGTHS
def test_interpolate_matches_torch_with_aligned_corners(table: Tensor, length: int) -> None:
    oracle = functional.interpolate(table.T.double()[None], size=length, mode="linear", align_corners=True)
    torch.testing.assert_close(interpolate(table, length), oracle[0].T.float(), rtol=0, atol=2e-7)


@LENGTHS
def test_interpolate_positions_matches_numpy(table: Tensor, length: int) -> None:
    scaled = np.arange(length) * (M / length)
    expected = np.stack([np.interp(scaled, np.arange(M), column) for column in table.T.double().numpy()], axis=1)
    assert np.abs(interpolate_positions(table, length).numpy() - expected).max() < 2e-7


@NAMES
def test_resize_to_own_length_keeps_table(table: Tensor, name: str) -> None:
    assert torch.equal(RESIZINGS[name](table, M), table)


@NAMES
def test_resize_of_one_row_to_one_row_keeps_it(name: str) -> None:
    table = torch.randn(1, D)
    assert torch.equal(RESIZINGS[name](table, 1), table)


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions"])
def test_interpolation_of_one_row_repeats_it(name: str) -> None:
    table = torch.randn(1, D)
    assert torch.equal(RESIZINGS[name](table, 5), table.expand(5, D))


def test_interpolate_keeps_first_and_last_row(table: Tensor) -> None:
    found = interpolate(table, 37)
    assert torch.equal(found[0], table[0])
    assert torch.equal(found[-1], table[-1])


def test_interpolate_by_integer_factor_of_steps_keeps_rows(table: Tensor) -> None:
    assert torch.equal(interpolate(table, 7 * (M - 1) + 1)[::7], table)


@pytest.mark.parametrize("factor", [2, 3, 8])
def test_interpolate_positions_to_multiple_of_length_keeps_rows(table: Tensor, factor: int) -> None:
    assert torch.equal(interpolate_positions(table, factor * M)[::factor], table)


def test_interpolate_positions_beyond_last_row_repeats_it(table: Tensor) -> None:
    assert torch.equal(interpolate_positions(table, 4 * M)[-4:], table[-1:].expand(4, D))


def test_hybrid_resize_keeps_rows_and_appends_sinusoids(table: Tensor) -> None:
    found = hybrid(table, 25)
    assert torch.equal(found[:M], table)
    expected = create_sinusoidal_embeddings(25, D, torch.empty(25, D))[M:]
    torch.testing.assert_close(found[M:], expected, rtol=0, atol=2e-7)


def test_hybrid_resize_matches_hybrid_module() -> None:
    module, no_ids = HybridPositionalEncoding(D, M, base=500.0), torch.zeros((1, 25), dtype=torch.int64)
    assert torch.equal(hybrid(module.weight, 25, base=500.0), module(no_ids)[0])


def test_truncate_keeps_first_rows_in_own_memory(table: Tensor) -> None:
    found = truncate(table, 4)
    assert torch.equal(found, table[:4])
    assert found.untyped_storage().nbytes() == 4 * D * 4


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions", "hybrid"])
def test_resized_table_accepts_longer_input(name: str) -> None:
    module, x = LearnedPositionalEncoding(D, M).eval(), torch.randn(2, 17, D)
    longer = LearnedPositionalEncoding(D, 17).eval()
    longer.weight = nn.Parameter(RESIZINGS[name](module.weight, 17))
    with pytest.raises(ValueError, match="exceeds the maximum length 10"):
        module(x)
    assert torch.equal(longer(x), x + longer.weight)
    assert longer.weight.is_leaf


@NAMES
def test_resize_does_not_change_its_input(table: Tensor, name: str) -> None:
    before = table.clone()
    RESIZINGS[name](table, M).zero_()
    assert torch.equal(table, before)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resize_keeps_dtype(table: Tensor, name: str, dtype: torch.dtype) -> None:
    assert RESIZINGS[name](table.to(dtype), 6 if name == "truncate" else 14).dtype == dtype


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions"])
def test_interpolation_of_bfloat16_table_rounds_once(table: Tensor, name: str) -> None:
    half = table.to(torch.bfloat16)
    assert torch.equal(RESIZINGS[name](half, 23), RESIZINGS[name](half.double(), 23).to(torch.bfloat16))


@pytest.mark.parametrize("length", [M + 1, 0, -3])
def test_truncate_to_longer_or_empty_table_is_rejected(table: Tensor, length: int) -> None:
    with pytest.raises(ValueError, match=f"length: got {length}, expected 1 to 10: truncation does not lengthen"):
        truncate(table, length)


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions", "hybrid"])
@pytest.mark.parametrize("length", [M - 1, 0, -3])
def test_lengthening_to_shorter_table_is_rejected(table: Tensor, name: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"length: got {length}, expected 10 or more; to shorten a table, truncate it"):
        RESIZINGS[name](table, length)


@NAMES
@pytest.mark.parametrize("shape", [(M,), (1, M, D), (0, D)])
def test_resize_of_wrong_shape_is_rejected(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"table: got shape .*, expected \(M, D\)"):
        RESIZINGS[name](torch.zeros(shape), M)


def test_hybrid_resize_of_odd_width_is_rejected() -> None:
    with pytest.raises(ValueError, match="d_model: got 7, expected an even width"):
        hybrid(torch.zeros(M, 7), 20)


def test_hybrid_positions_with_new_max_len_keep_rows() -> None:
    frontend = HybridEmbedding(11, D, M, max_len=20).eval()
    longer, ids = resize_positions(frontend, 30), torch.zeros((1, 30), dtype=torch.int64)
    assert (longer.config.max_len, longer.state_dict()["positions.weight"].shape) == (30, (M, D))
    assert torch.equal(longer.eval()(ids)[:, :20], frontend(ids[:, :20]))
    with pytest.raises(ValueError, match="resize: got 'truncate', expected only for a learned table"):
        resize_positions(frontend, 5, "truncate")


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "factorised"])
def test_resize_of_grid_positions_is_rejected(positions: Literal["learned", "sinusoidal", "factorised"]) -> None:
    with pytest.raises(ValueError, match="max_len: got 12, expected 6, the cells of a grid"):
        resize_positions(GridEmbedding(11, 8, (2, 3), positions), 12, "interpolate")


@pytest.mark.parametrize(
    ("name", "max_len", "message"),
    [
        ("gpt2", 10**23, r"^max_len: got 1[0]{23}, expected at most 16777216, the rows of a table$"),
        ("ctrl", 10**11, "^rows: got 1[0]{11}, expected at most 16777216, in a table of positions$"),
        ("llama", 2**62 + 1, "^max_len: got 4611686018427387905, expected at most 4611686018427387904$"),
    ],
)
def test_resize_to_too_many_positions_is_rejected(name: str, max_len: int, message: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    frontend = read_frontend(tmp_path)
    with pytest.raises(ValueError, match=message):
        resize_positions(frontend, max_len, "interpolate" if name == "gpt2" else None)
