"""Hierarchical positions, against torch's own embeddings added up."""

import pytest
import torch
from torch import Tensor, nn

from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from tests.models.rejections import rejection

D = 6
TEXT = {"paragraph": 3, "sentence": 4, "word": 5}
TIME = {"year": 30, "month": 12, "day": 31, "hour": 24}


def draw(levels: dict[str, int], batch: int, length: int) -> Tensor:
    """Random indices of every level: (batch, length, levels)."""
    return torch.stack([torch.randint(rows, (batch, length)) for rows in levels.values()], dim=-1)


@pytest.mark.parametrize("levels", [TEXT, TIME, {"word": 9}], ids=["text", "time", "one level"])
@pytest.mark.parametrize("batch", [1, 2], ids=["ids for all rows", "ids per row"])
def test_levels_match_sum_of_torch_embeddings(levels: dict[str, int], batch: int) -> None:
    torch.manual_seed(0)
    module, x, ids = HierarchicalPositionalEncoding(D, levels).eval(), torch.randn(2, 7, D), draw(levels, batch, 7)
    oracles = [nn.Embedding(rows, D, _weight=module.tables[level]) for level, rows in levels.items()]
    expected = x + sum(oracle(ids[..., level]) for level, oracle in enumerate(oracles))
    torch.testing.assert_close(module(x, ids), expected, rtol=0, atol=1e-6)


def test_level_tables_have_names_and_order_of_levels() -> None:
    module = HierarchicalPositionalEncoding(D, TIME)
    shapes = [(name, tuple(table.shape)) for name, table in module.state_dict().items()]
    assert shapes == [(f"tables.{level}", (rows, D)) for level, rows in TIME.items()]


def test_only_used_level_rows_have_gradient() -> None:
    module = HierarchicalPositionalEncoding(D, TEXT, dropout=0.0)
    module(torch.zeros(2, 2, D), torch.tensor([[[0, 1, 0], [0, 1, 4]]])).sum().backward()
    gradients = {level: table.grad[:, 0].tolist() for level, table in module.tables.items()}
    assert gradients == {"paragraph": [4, 0, 0], "sentence": [0, 4, 0, 0], "word": [2, 0, 0, 0, 2]}


def test_levels_accept_zero_tokens() -> None:
    ids = torch.zeros((1, 0, 3), dtype=torch.int64)
    assert HierarchicalPositionalEncoding(D, TEXT).eval()(torch.randn(2, 0, D), ids).shape == (2, 0, D)


def test_invalid_levels_are_rejected() -> None:
    module, x = HierarchicalPositionalEncoding(D, TEXT), torch.randn(2, 2, D)
    for index, message in (
        ([3, 0, 0], "paragraph got 3, expected 0 to 2"),
        ([0, 4, 9], "sentence got 4, expected 0 to 3"),
        ([0, 0, 5], "word got 5, expected 0 to 4"),
        ([0, -1, 0], "sentence got -1, expected 0 to 3"),
    ):
        assert rejection(ValueError, module, x, torch.tensor([[[2, 3, 4], index]])) == f"position_ids: {message}"
    for shape in ((1, 2), (1, 2, 2), (3, 2, 3), (1, 1, 3), (1, 1, 2, 3)):
        message = f"position_ids: got shape {shape}, expected (1, 2, 3) or (2, 2, 3)"
        assert rejection(ValueError, module, x, torch.zeros(shape, dtype=torch.int64)) == message
    assert rejection(ValueError, HierarchicalPositionalEncoding, D, {}) == "levels: got none, expected one or more"
