"""Resized tables, against torch's and numpy's own interpolation."""

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
from preblock.models.embeddings import GridEmbedding, HybridEmbedding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding

D, M = 6, 10
LENGTHS = pytest.mark.parametrize("length", [M, M + 1, 2 * M - 1, 2 * M, 23, 1000])
NAMES = pytest.mark.parametrize("name", list(RESIZINGS))


@pytest.fixture
def table() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(M, D)


def test_every_choice_has_a_name() -> None:
    assert list(RESIZINGS) == ["truncate", "interpolate", "interpolate_positions", "hybrid"]


@LENGTHS
def test_interpolation_is_torchs_with_aligned_ends(table: Tensor, length: int) -> None:
    oracle = functional.interpolate(table.T.double()[None], size=length, mode="linear", align_corners=True)
    torch.testing.assert_close(interpolate(table, length), oracle[0].T.float(), rtol=0, atol=2e-7)


@LENGTHS
def test_interpolated_positions_equal_numpy(table: Tensor, length: int) -> None:
    scaled = np.arange(length) * (M / length)
    expected = np.stack([np.interp(scaled, np.arange(M), column) for column in table.T.double().numpy()], axis=1)
    assert np.abs(interpolate_positions(table, length).numpy() - expected).max() < 2e-7


@NAMES
def test_its_own_length_leaves_a_table_unchanged(table: Tensor, name: str) -> None:
    assert torch.equal(RESIZINGS[name](table, M), table)


@NAMES
def test_a_table_of_one_row_keeps_it(name: str) -> None:
    table = torch.randn(1, D)
    assert torch.equal(RESIZINGS[name](table, 1), table)


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions"])
def test_one_row_is_stretched_to_itself(name: str) -> None:
    table = torch.randn(1, D)
    assert torch.equal(RESIZINGS[name](table, 5), table.expand(5, D))


def test_interpolation_keeps_both_ends(table: Tensor) -> None:
    found = interpolate(table, 37)
    assert torch.equal(found[0], table[0])
    assert torch.equal(found[-1], table[-1])


def test_interpolation_by_a_whole_factor_of_steps_keeps_rows(table: Tensor) -> None:
    assert torch.equal(interpolate(table, 7 * (M - 1) + 1)[::7], table)


@pytest.mark.parametrize("factor", [2, 3, 8])
def test_interpolation_to_a_multiple_of_the_length_keeps_rows(table: Tensor, factor: int) -> None:
    assert torch.equal(interpolate_positions(table, factor * M)[::factor], table)


def test_positions_beyond_the_last_row_take_that_row(table: Tensor) -> None:
    assert torch.equal(interpolate_positions(table, 4 * M)[-4:], table[-1:].expand(4, D))


def test_hybrid_keeps_the_rows_and_adds_sinusoids(table: Tensor) -> None:
    found = hybrid(table, 25)
    assert torch.equal(found[:M], table)
    expected = create_sinusoidal_embeddings(25, D, torch.empty(25, D))[M:]
    torch.testing.assert_close(found[M:], expected, rtol=0, atol=2e-7)


def test_hybrid_is_what_the_hybrid_module_adds() -> None:
    module, no_ids = HybridPositionalEncoding(D, M, base=500.0), torch.zeros((1, 25), dtype=torch.int64)
    assert torch.equal(hybrid(module.weight, 25, base=500.0), module(no_ids)[0])


def test_truncation_keeps_the_first_rows_in_memory_of_their_own(table: Tensor) -> None:
    found = truncate(table, 4)
    assert torch.equal(found, table[:4])
    assert found.untyped_storage().nbytes() == 4 * D * 4


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions", "hybrid"])
def test_a_resized_table_serves_the_longer_input(name: str) -> None:
    module, x = LearnedPositionalEncoding(D, M).eval(), torch.randn(2, 17, D)
    longer = LearnedPositionalEncoding(D, 17).eval()
    longer.weight = nn.Parameter(RESIZINGS[name](module.weight, 17))
    with pytest.raises(ValueError, match="exceeds the maximum length 10"):
        module(x)
    assert torch.equal(longer(x), x + longer.weight)
    assert longer.weight.is_leaf


@NAMES
def test_the_table_itself_is_left_alone(table: Tensor, name: str) -> None:
    before = table.clone()
    RESIZINGS[name](table, M).zero_()
    assert torch.equal(table, before)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_the_table_stays(table: Tensor, name: str, dtype: torch.dtype) -> None:
    assert RESIZINGS[name](table.to(dtype), 6 if name == "truncate" else 14).dtype == dtype


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions"])
def test_half_table_is_interpolated_and_rounded_once(table: Tensor, name: str) -> None:
    half = table.to(torch.bfloat16)
    assert torch.equal(RESIZINGS[name](half, 23), RESIZINGS[name](half.double(), 23).to(torch.bfloat16))


@pytest.mark.parametrize("length", [M + 1, 0, -3])
def test_truncation_to_a_longer_or_an_empty_table_is_refused(table: Tensor, length: int) -> None:
    with pytest.raises(ValueError, match=f"length: got {length}, expected 1 to 10: truncation does not lengthen"):
        truncate(table, length)


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions", "hybrid"])
@pytest.mark.parametrize("length", [M - 1, 0, -3])
def test_lengthening_to_a_shorter_table_is_refused(table: Tensor, name: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"length: got {length}, expected 10 or more; to shorten a table, truncate it"):
        RESIZINGS[name](table, length)


@NAMES
@pytest.mark.parametrize("shape", [(M,), (1, M, D), (0, D)])
def test_what_is_no_table_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"table: got shape .*, expected \(M, D\)"):
        RESIZINGS[name](torch.zeros(shape), M)


def test_hybrid_of_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="d_model: got 7, expected an even width"):
        hybrid(torch.zeros(M, 7), 20)


def test_hybrid_positions_keep_their_rows_at_another_limit() -> None:
    frontend = HybridEmbedding(11, D, M, max_len=20).eval()
    longer, ids = resize_positions(frontend, 30), torch.zeros((1, 30), dtype=torch.int64)
    assert (longer.config.max_len, longer.state_dict()["positions.weight"].shape) == (30, (M, D))
    assert torch.equal(longer.eval()(ids)[:, :20], frontend(ids[:, :20]))
    with pytest.raises(ValueError, match="resize: got 'truncate', expected only for a learned table"):
        resize_positions(frontend, 5, "truncate")


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "factorised"])
def test_a_grid_is_not_resized_as_if_it_were_a_line(positions: Literal["learned", "sinusoidal", "factorised"]) -> None:
    with pytest.raises(ValueError, match="max_len: got 12, expected 6, the cells of a grid"):
        resize_positions(GridEmbedding(11, 8, (2, 3), positions), 12, "interpolate")
