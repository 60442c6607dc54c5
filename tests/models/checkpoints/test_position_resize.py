"""Resized tables, against torch's and numpy's own interpolation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from torch.nn import functional

from preblock.models.checkpoints.position_resize import (
    RESIZINGS,
    hybrid,
    interpolate,
    interpolate_positions,
    resize_positions,
)
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.embeddings import GridEmbedding, HybridEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from tests.families.library_models import save
from tests.models.rejections import rejection

Table = NDArray[np.float32]

D, M = 6, 10
LENGTHS = (M, M + 1, 2 * M - 1, 2 * M, 23, 1000)
NAMES = pytest.mark.parametrize("name", ["truncate", "interpolate", "interpolate_positions", "hybrid"])


@pytest.fixture
def table() -> Table:
    return np.random.default_rng(0).standard_normal((M, D), np.float32)


def test_interpolate_matches_torch_with_aligned_corners(table: Table) -> None:
    columns = torch.from_numpy(table).T.double()[None]
    for length in LENGTHS:
        oracle = functional.interpolate(columns, size=length, mode="linear", align_corners=True)[0].T.numpy()
        assert np.abs(interpolate(table, length) - oracle).max() <= 2e-7
    assert np.array_equal(interpolate(table, 7 * (M - 1) + 1)[::7], table)


def test_interpolate_positions_matches_numpy(table: Table) -> None:
    for length in LENGTHS:
        scaled = np.arange(length) * (M / length)
        expected = np.stack([np.interp(scaled, np.arange(M), column) for column in table.T.astype(float)], axis=1)
        assert np.abs(interpolate_positions(table, length) - expected).max() < 2e-7
    for factor in (2, 3, 8):
        found = interpolate_positions(table, factor * M)
        assert np.array_equal(found[::factor], table)
        assert (found[-factor:] == table[-1]).all()


@NAMES
def test_resize_to_own_length_copies_table(table: Table, name: str) -> None:
    before = table.copy()
    for rows in (table, table[:1]):
        found = RESIZINGS[name](rows, len(rows))
        assert np.array_equal(found, rows)
        found.fill(0)
    assert np.array_equal(table, before)
    for dtype in (np.float64, bfloat16):
        assert RESIZINGS[name](table.astype(dtype), 6 if name == "truncate" else 14).dtype == dtype


@pytest.mark.parametrize("name", ["interpolate", "interpolate_positions"])
def test_interpolation_repeats_one_row_and_rounds_once(table: Table, name: str) -> None:
    assert (RESIZINGS[name](table[:1], 5) == table[0]).all()
    half = table.astype(bfloat16)
    assert np.array_equal(RESIZINGS[name](half, 23), RESIZINGS[name](half.astype(np.float64), 23).astype(bfloat16))


def test_hybrid_resize_matches_hybrid_module() -> None:
    module, no_ids = HybridPositionalEncoding(D, M), torch.zeros((1, 25), dtype=torch.int64)
    assert np.array_equal(hybrid(module.weight.detach().numpy(), 25), module(no_ids)[0].detach())


@NAMES
def test_resize_to_wrong_length_is_rejected(table: Table, name: str) -> None:
    for length in (M + 1, 0, -3) if name == "truncate" else (M - 1, 0, -3):
        message = f"length: got {length}, expected {'1 to 10' if name == 'truncate' else '10 or more'}"
        assert message in rejection(ValueError, RESIZINGS[name], table, length)


def test_hybrid_positions_with_new_max_len_keep_rows() -> None:
    frontend = HybridEmbedding(11, D, M, max_len=20).eval()
    longer, ids = resize_positions(frontend.data(), 30), torch.zeros((1, 30), dtype=torch.int64)
    assert (longer.config.max_len, longer.tensors["positions.weight"].shape) == (30, (M, D))
    assert torch.equal(FrontEnd.from_data(longer).eval()(ids)[:, :20], frontend(ids[:, :20]))
    message = "resize: got 'truncate', expected only for a learned table"
    assert message in rejection(ValueError, resize_positions, frontend.data(), 5, "truncate")


def test_resize_keeps_rows_before_first_position(tmp_path: Path) -> None:
    save("opt", tmp_path)
    frontend = read_frontend(tmp_path)
    table = frontend.tensors["positions.weight"]
    assert len(table) == 66
    for length, how, expected in (
        (100, "interpolate", [*table[:2], *interpolate(table[2:], 100)]),
        (9, "truncate", table[:11]),
    ):
        resized = resize_positions(frontend, length, how)
        assert resized.config.max_len == length
        assert np.array_equal(resized.tensors["positions.weight"], expected), how


def test_resize_of_grid_positions_is_rejected() -> None:
    data = GridEmbedding(11, 8, (2, 3)).data()
    message = "max_len: got 12, expected 6, the cells of a grid"
    assert rejection(ValueError, resize_positions, data, 12, "interpolate") == message


def test_resize_to_too_many_positions_is_rejected(tmp_path: Path) -> None:
    for name, max_len, how, message in (
        ("gpt2", 10**23, "interpolate", f"max_len: got {10**23}, expected at most 16777216, the rows of a table"),
        ("ctrl", 10**11, None, f"rows: got {10**11}, expected at most 16777216, in a table of positions"),
        ("llama", 2**62 + 1, None, f"max_len: got {2**62 + 1}, expected at most {2**62}"),
    ):
        save(name, tmp_path)
        assert rejection(ValueError, resize_positions, read_frontend(tmp_path), max_len, how) == message
