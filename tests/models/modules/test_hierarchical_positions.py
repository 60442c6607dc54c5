"""Hierarchical positions, against torch's own embeddings added up."""

import pytest
import torch
from torch import nn

from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from tests.models.rejections import rejection

D = 6
TEXT = {"paragraph": 3, "sentence": 4, "word": 5}


@pytest.mark.parametrize("levels", [TEXT, {"word": 9}], ids=["text", "one level"])
@pytest.mark.parametrize("batch", [1, 2], ids=["ids for all rows", "ids per row"])
def test_levels_match_sum_of_torch_embeddings(levels: dict[str, int], batch: int) -> None:
    torch.manual_seed(0)
    module, x = HierarchicalPositionalEncoding(D, levels).eval(), torch.randn(2, 7, D)
    ids = torch.stack([torch.randint(rows, (batch, 7)) for rows in levels.values()], dim=-1)
    oracles = [nn.Embedding(rows, D, _weight=module.tables[level]) for level, rows in levels.items()]
    expected = x + sum(oracle(ids[..., level]) for level, oracle in enumerate(oracles))
    assert module(x[:, :0], ids[:, :0]).shape == (2, 0, D)
    torch.testing.assert_close(module(x, ids), expected, rtol=0, atol=1e-6)


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
