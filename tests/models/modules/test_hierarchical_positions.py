"""Hierarchical positions, against torch's own embeddings added up."""

import pytest
import torch
from torch import Tensor, nn

from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding

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


def test_levels_of_ids_return_position_vectors() -> None:
    module, ids = HierarchicalPositionalEncoding(D, TEXT), torch.tensor([[[2, 3, 4], [0, 0, 0]]])
    found = module(torch.zeros((5, 2), dtype=torch.int64), ids)
    last, first = (sum(module.tables[level][row] for level in TEXT) for row in (-1, 0))
    assert torch.equal(found, torch.stack((last, first)).unsqueeze(0))


def test_changed_level_index_changes_only_its_table_row() -> None:
    torch.manual_seed(0)
    module, no_ids = HierarchicalPositionalEncoding(D, TEXT), torch.zeros((1, 1), dtype=torch.int64)
    before, after = (module(no_ids, torch.tensor([[[1, sentence, 2]]])) for sentence in (0, 3))
    step = module.tables["sentence"][3] - module.tables["sentence"][0]
    torch.testing.assert_close((after - before)[0, 0], step, rtol=0, atol=1e-7)


def test_level_tables_have_names_and_order_of_levels() -> None:
    module = HierarchicalPositionalEncoding(D, TIME)
    assert {name: tuple(table.shape) for name, table in module.state_dict().items()} == {
        "tables.year": (30, D),
        "tables.month": (12, D),
        "tables.day": (31, D),
        "tables.hour": (24, D),
    }
    assert list(module.state_dict()) == ["tables.year", "tables.month", "tables.day", "tables.hour"]


def test_level_tables_are_normally_initialised() -> None:
    torch.manual_seed(0)
    for table in HierarchicalPositionalEncoding(256, {"sentence": 200, "word": 500}).parameters():
        assert abs(table.detach().mean()) < 5e-4
        assert abs(table.detach().std() - 0.02) < 5e-4


def test_only_used_level_rows_have_gradient() -> None:
    module = HierarchicalPositionalEncoding(D, TEXT, dropout=0.0)
    module(torch.zeros(2, 2, D), torch.tensor([[[0, 1, 0], [0, 1, 4]]])).sum().backward()
    gradients = {level: table.grad[:, 0].tolist() for level, table in module.tables.items()}
    assert gradients == {"paragraph": [4, 0, 0], "sentence": [0, 4, 0, 0], "word": [2, 0, 0, 0, 2]}


def test_level_dropout_applies_after_sum_only_in_training() -> None:
    torch.manual_seed(0)
    module, x, ids = HierarchicalPositionalEncoding(64, TEXT, dropout=0.5), torch.randn(8, 50, 64), draw(TEXT, 8, 50)
    expected = module.eval()(x, ids)
    found = module.train()(x, ids)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52


def test_levels_accept_zero_tokens() -> None:
    ids = torch.zeros((1, 0, 3), dtype=torch.int64)
    assert HierarchicalPositionalEncoding(D, TEXT).eval()(torch.randn(2, 0, D), ids).shape == (2, 0, D)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([3, 0, 0], "position_ids: paragraph got 3, expected 0 to 2"),
        ([0, 4, 9], "position_ids: sentence got 4, expected 0 to 3"),
        ([0, 0, 5], "position_ids: word got 5, expected 0 to 4"),
        ([0, -1, 0], "position_ids: sentence got -1, expected 0 to 3"),
    ],
)
def test_level_index_out_of_range_is_rejected(index: list[int], message: str) -> None:
    ids = torch.tensor([[[2, 3, 4], index]])
    with pytest.raises(ValueError, match=message):
        HierarchicalPositionalEncoding(D, TEXT)(torch.randn(2, 2, D), ids)


@pytest.mark.parametrize("shape", [(1, 7), (1, 7, 2), (3, 7, 3), (1, 6, 3), (1, 1, 7, 3)])
def test_level_position_ids_of_wrong_shape_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids: got shape .*expected \(1, 7, 3\) or \(2, 7, 3\)"):
        HierarchicalPositionalEncoding(D, TEXT)(torch.randn(2, 7, D), torch.zeros(shape, dtype=torch.int64))


def test_empty_levels_are_rejected() -> None:
    with pytest.raises(ValueError, match="levels: got none, expected one or more"):
        HierarchicalPositionalEncoding(D, {})
