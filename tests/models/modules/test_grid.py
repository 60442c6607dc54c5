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


@pytest.fixture
def pix2struct() -> Pix2StructVisionEmbeddings:
    torch.manual_seed(0)
    config = Pix2StructVisionConfig(hidden_size=D, patch_embed_hidden_size=D, seq_len=max(H, W), dropout_rate=0.0)
    return Pix2StructVisionEmbeddings(config).eval()  # type: ignore[arg-type]


def test_grid_ids_are_row_major() -> None:
    assert grid_ids(2, 3).tolist() == [[[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]]


def test_sinusoidal_grid_matches_detr() -> None:
    found = SinusoidalGridEncoding(D, H, W)(NO_IDS).reshape(H, W, D)
    torch.testing.assert_close(found[1:, 1:], detr(H - 1, W - 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(2, 2), (W, H), (40, 2)], ids=["smaller", "turned", "beyond the table"])
def test_sinusoidal_grid_of_other_size_matches_detr(height: int, width: int) -> None:
    ids = torch.zeros((1, height * width), dtype=torch.int64)
    found = SinusoidalGridEncoding(D, H, W)(ids, grid_ids(height, width) + 1)
    torch.testing.assert_close(found[0], detr(height, width).flatten(0, 1), rtol=0, atol=1e-6)


def test_sinusoidal_grid_uses_given_base() -> None:
    found = SinusoidalGridEncoding(D, H, W, base=16.0)(NO_IDS, torch.tensor([[[0, 8]]]).expand(1, H * W, 2))
    # Each axis has four columns: the second wavelength is the square root of the base.
    expected = [0.0, 1.0, 0.0, 1.0, *(f(torch.tensor(angle)) for angle in (8.0, 2.0) for f in (torch.sin, torch.cos))]
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_factorised_grid_matches_pix2struct(pix2struct: Pix2StructVisionEmbeddings) -> None:
    module, patches = FactorisedGridEncoding(D, max(H, W), max(H, W)).eval(), torch.randn(2, 4, D)
    module.load_state_dict(
        {
            "axes.tables.row": pix2struct.row_embedder.weight,
            "axes.tables.column": pix2struct.column_embedder.weight,
        }
    )
    ids = torch.tensor([[[0, 4], [2, 0], [2, 4], [1, 3]], [[4, 4], [0, 0], [3, 1], [3, 1]]])
    expected = pix2struct(torch.cat((ids, patches), dim=-1))
    found = module(pix2struct.patch_projection(patches), ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_learned_grid_adds_table_in_order() -> None:
    module, x = LearnedGridEncoding(D, H, W).eval(), torch.randn(2, H * W, D)
    assert torch.equal(module(x), x + module.weight)


def test_learned_grid_looks_up_cell_by_row_and_column() -> None:
    module, ids = LearnedGridEncoding(D, H, W), torch.tensor([[[2, 4], [0, 3], [1, 0]]])
    oracle = nn.Embedding(H * W, D, _weight=module.weight)
    assert torch.equal(module(NO_IDS[:, :3], ids), oracle(torch.tensor([[14, 3, 5]])))


@KINDS
def test_grid_adds_same_positions_to_vectors_and_ids(kind: type[Module]) -> None:
    module, x = kind(D, H, W).eval(), torch.randn(2, H * W, D)
    assert module(NO_IDS).shape == (1, H * W, D)
    assert torch.equal(module(x), x + module(NO_IDS))


@KINDS
def test_smaller_grid_matches_corner_of_whole_grid(kind: type[Module]) -> None:
    module, x = kind(D, H, W).eval(), torch.randn(2, 6, D)
    corner = module(NO_IDS).reshape(H, W, D)[:2, :3].flatten(0, 1)
    assert torch.equal(module(x, grid_ids(2, 3)), x + corner)


@KINDS
def test_grid_accepts_any_patch_order_per_row(kind: type[Module]) -> None:
    module, x = kind(D, H, W).eval(), torch.randn(2, H * W, D)
    orders = torch.stack([torch.randperm(H * W) for _ in range(2)])
    expected = x + module(NO_IDS)[0, orders]
    assert torch.equal(module(x, grid_ids(H, W)[0, orders]), expected)


@KINDS
def test_grid_dropout_applies_after_sum_only_in_training(kind: type[Module]) -> None:
    torch.manual_seed(0)
    module, x = kind(64, 5, 10, dropout=0.5), torch.randn(8, 50, 64)
    expected = module.eval()(x)
    found = module.train()(x)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52


@KINDS
@pytest.mark.parametrize("length", [1, H * W - 1, H * W + 1])
def test_wrong_number_of_patches_is_rejected(kind: type[Module], length: int) -> None:
    with pytest.raises(ValueError, match=rf"x: got {length} patches, expected 15 \(a grid of 3 x 5\)"):
        kind(D, H, W)(torch.randn(2, length, D))


@KINDS
@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (3, 4, 2), (1, 5, 2)])
def test_grid_position_ids_of_wrong_shape_are_rejected(kind: type[Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids: got shape .*expected \(1, 4, 2\) or \(2, 4, 2\)"):
        kind(D, H, W)(torch.randn(2, 4, D), torch.zeros(shape, dtype=torch.int64))


@KINDS
def test_negative_grid_index_is_rejected(kind: type[Module]) -> None:
    with pytest.raises(ValueError, match=r"position_ids: .*got -1, expected 0"):
        kind(D, H, W)(torch.randn(1, 1, D), torch.tensor([[[0, -1]]]))


@pytest.mark.parametrize("kind", [FactorisedGridEncoding, LearnedGridEncoding])
@pytest.mark.parametrize(
    ("cell", "message"), [([H, 0], "row got 3, expected 0 to 2"), ([0, W], "column got 5, expected 0 to 4")]
)
def test_grid_cell_outside_tables_is_rejected(kind: type[Module], cell: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(D, H, W)(torch.randn(1, 1, D), torch.tensor([[cell]]))


@pytest.mark.parametrize("d_model", [6, 7])
def test_sinusoidal_grid_width_not_divisible_by_4_is_rejected(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected a multiple of 4"):
        SinusoidalGridEncoding(d_model, H, W)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [(LearnedGridEncoding, 196 * 768), (FactorisedGridEncoding, 28 * 768), (SinusoidalGridEncoding, 0)],
)
def test_grid_parameter_counts_match_vit_base(kind: type[Module], parameters: int) -> None:
    # Dosovitskiy et al. 2021, base size: 224 pixels in patches of 16.
    assert sum(parameter.numel() for parameter in kind(768, 14, 14).parameters()) == parameters


def test_sinusoidal_grid_has_empty_state_dict() -> None:
    assert SinusoidalGridEncoding(D, H, W).state_dict() == {}


@pytest.mark.parametrize("kind", [FactorisedGridEncoding, LearnedGridEncoding])
def test_learned_grid_tables_are_normally_initialised(kind: type[Module]) -> None:
    torch.manual_seed(0)
    for table in kind(256, 20, 25).parameters():
        assert abs(table.detach().mean()) < 2e-3
        assert abs(table.detach().std() - 0.02) < 2e-3
