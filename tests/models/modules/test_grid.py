"""Positions in two dimensions, against DETR's sinusoids and Pix2Struct's tables as transformers computes them."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Pix2StructVisionConfig
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEmbeddings

from preblock.models.modules.grid import (
    FactorisedGridEncoding,
    LearnedGridEncoding,
    SinusoidalGridEncoding,
    grid_ids,
)
from tests.models.rejections import rejection

Module = FactorisedGridEncoding | LearnedGridEncoding | SinusoidalGridEncoding
KINDS = pytest.mark.parametrize("kind", [FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding])

D, H, W = 8, 3, 5
NO_IDS = torch.zeros((1, H * W), dtype=torch.int64)
"""Ids of patches: a module returns its vectors alone."""


def detr(height: int, width: int) -> Tensor:
    """Return DETR's vectors (height, width, D). DETR counts rows and columns from 1."""
    shape = torch.Size((1, D, height, width))
    vectors: Tensor = DetrSinePositionEmbedding(D // 2)(shape, torch.device("cpu"), torch.float64)
    return vectors[0].permute(1, 2, 0).float()


def test_sinusoidal_grid_matches_detr() -> None:
    module = SinusoidalGridEncoding(D, H, W)
    found = module(NO_IDS).reshape(H, W, D)
    torch.testing.assert_close(found[1:, 1:], detr(H - 1, W - 1), rtol=0, atol=1e-6)
    for height, width in ((2, 2), (W, H), (40, 2)):  # smaller, turned, beyond the table
        ids = torch.zeros((1, height * width), dtype=torch.int64)
        found = module(ids, grid_ids(height, width) + 1)[0]
        torch.testing.assert_close(found, detr(height, width).flatten(0, 1), rtol=0, atol=1e-6)


def test_sinusoidal_grid_uses_given_base() -> None:
    found = SinusoidalGridEncoding(D, H, W, base=16.0)(NO_IDS[:, :1], torch.tensor([[[0, 8]]]))
    # Each axis has four columns: the second wavelength is the square root of the base.
    expected = [0.0, 1.0, 0.0, 1.0, *(f(torch.tensor(angle)) for angle in (8.0, 2.0) for f in (torch.sin, torch.cos))]
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_factorised_grid_matches_pix2struct() -> None:
    torch.manual_seed(0)
    config = Pix2StructVisionConfig(hidden_size=D, patch_embed_hidden_size=D, seq_len=max(H, W), dropout_rate=0.0)
    library = Pix2StructVisionEmbeddings(config).eval()  # type: ignore[arg-type]
    module, patches = FactorisedGridEncoding(D, max(H, W), max(H, W)).eval(), torch.randn(2, 4, D)
    tables = {"row": library.row_embedder.weight, "column": library.column_embedder.weight}
    module.load_state_dict({f"axes.tables.{axis}": table for axis, table in tables.items()})
    ids = torch.tensor([[[0, 4], [2, 0], [2, 4], [1, 3]], [[4, 4], [0, 0], [3, 1], [3, 1]]])
    found, expected = module(library.patch_projection(patches), ids), library(torch.cat((ids, patches), dim=-1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_learned_grid_looks_up_cell_by_row_and_column() -> None:
    module, ids = LearnedGridEncoding(D, H, W), torch.tensor([[[2, 4], [0, 3], [1, 0]]])
    oracle = nn.Embedding(H * W, D, _weight=module.weight)
    assert torch.equal(module(NO_IDS[:, :3], ids), oracle(torch.tensor([[14, 3, 5]])))
    assert torch.equal(module(NO_IDS)[0], module.weight)


@KINDS
def test_grid_accepts_any_cells_in_any_order(kind: type[Module]) -> None:
    module, x = kind(D, H, W).eval(), torch.randn(2, H * W, D)
    whole = module(NO_IDS)[0]
    orders = torch.stack([torch.randperm(H * W) for _ in range(2)])
    assert torch.equal(module(x, grid_ids(H, W)[0, orders]), x + whole[orders])
    corner = whole.reshape(H, W, D)[:2, :3].flatten(0, 1)
    assert torch.equal(module(x[:, :6], grid_ids(2, 3)), x[:, :6] + corner)


@KINDS
def test_invalid_grid_positions_are_rejected(kind: type[Module]) -> None:
    module = kind(D, H, W)
    for length in (1, H * W - 1, H * W + 1):
        message = f"x: got {length} patches, expected 15 (a grid of 3 x 5)"
        assert message in rejection(ValueError, module, torch.randn(2, length, D))
    for shape in ((1, 4), (1, 4, 1), (3, 4, 2), (1, 5, 2)):
        message = f"position_ids: got shape {shape}, expected (1, 4, 2) or (2, 4, 2)"
        assert rejection(ValueError, module, torch.randn(2, 4, D), torch.zeros(shape, dtype=torch.int64)) == message
    cells = [([0, -1], "got -1, expected 0")]
    if kind is not SinusoidalGridEncoding:
        cells += [([H, 0], "row got 3, expected 0 to 2"), ([0, W], "column got 5, expected 0 to 4")]
    for cell, message in cells:
        assert message in rejection(ValueError, module, torch.randn(1, 1, D), torch.tensor([[cell]])), cell


def test_sinusoidal_grid_width_not_divisible_by_4_is_rejected() -> None:
    for width in (6, 7):
        message = f"d_model: got {width}, expected a multiple of 4"
        assert message in rejection(ValueError, SinusoidalGridEncoding, width, H, W)
