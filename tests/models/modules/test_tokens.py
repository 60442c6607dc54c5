"""The token table."""

import math

import pytest
import torch
from torch import nn

from preblock.models.modules.tokens import TokenEmbedding

IDS = torch.tensor([[3, 0, 9], [9, 9, 1]])


def test_token_table_lookup_equals_torch_embedding() -> None:
    table = TokenEmbedding(10, 4)
    assert torch.equal(table(IDS), nn.Embedding(10, 4, _weight=table.weight)(IDS))


def test_token_table_starts_normally_distributed() -> None:
    torch.manual_seed(0)
    table = TokenEmbedding(1000, 100).weight.detach().double()
    assert abs(table.mean()) < 2e-4
    assert abs(table.std() - 0.02) < 2e-4


@pytest.mark.parametrize(("scale", "factor"), [(True, math.sqrt(7)), (3.0, 3.0), (1.0, 1.0), (False, 1.0)])
def test_scale_multiplies_every_token_vector(scale: float | bool, factor: float) -> None:
    table = TokenEmbedding(10, 7, scale=scale)
    assert torch.equal(table(IDS), nn.Embedding(10, 7, _weight=table.weight)(IDS) * factor)


def test_padding_row_starts_at_zero() -> None:
    table = TokenEmbedding(10, 4, padding_idx=9)
    assert (table.weight == 0).all(dim=1).tolist() == [False] * 9 + [True]


def test_padding_row_gets_no_gradient_as_in_torch() -> None:
    table = TokenEmbedding(10, 4, padding_idx=9)
    oracle = nn.Embedding(10, 4, padding_idx=9)
    for module in (table, oracle):
        module(IDS).sum().backward()
    assert oracle.weight.grad is not None
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad, oracle.weight.grad)
    assert table.weight.grad[:, 0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0]


def test_pretrained_values_are_kept_including_padding_row() -> None:
    pretrained = torch.randn(10, 4)
    table = TokenEmbedding(10, 4, padding_idx=9, init=pretrained)
    assert torch.equal(table.weight, pretrained)


def test_training_does_not_change_pretrained_tensor() -> None:
    pretrained = torch.randn(10, 4)
    before = pretrained.clone()
    table = TokenEmbedding(10, 4, init=pretrained)
    table(IDS).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()
    assert torch.equal(pretrained, before)
    assert not torch.equal(table.weight, before)


def test_frozen_table_requires_no_gradient() -> None:
    table = TokenEmbedding(10, 4, init=torch.ones(10, 4), freeze=True)
    assert not table.weight.requires_grad
    assert not table(IDS).requires_grad


def test_tied_projection_shares_table_weight() -> None:
    table, projection = TokenEmbedding(10, 4), nn.Linear(4, 10, bias=False)
    table.tie(projection)
    assert projection.weight is table.weight
    assert len(list(nn.ModuleList([table, projection]).parameters())) == 1


def test_tied_table_sums_gradients_of_both_uses() -> None:
    pretrained = torch.randn(10, 4)
    tied, projection = TokenEmbedding(10, 4, init=pretrained), nn.Linear(4, 10, bias=False)
    tied.tie(projection)
    projection(tied(IDS)).sum().backward()
    # Apart, torch gives each side its own gradient; tied, they add up.
    table, output = nn.Embedding(10, 4, _weight=pretrained.clone()), nn.Linear(4, 10, bias=False)
    output.weight.data.copy_(pretrained)
    output(table(IDS)).sum().backward()
    assert table.weight.grad is not None
    assert output.weight.grad is not None
    torch.testing.assert_close(tied.weight.grad, table.weight.grad + output.weight.grad)


@pytest.mark.parametrize("padding_idx", [-1, 10])
def test_padding_id_outside_table_is_rejected(padding_idx: int) -> None:
    with pytest.raises(ValueError, match=f"padding_idx: got {padding_idx}, expected 0 to 9"):
        TokenEmbedding(10, 4, padding_idx=padding_idx)


def test_pretrained_values_with_wrong_shape_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"pretrained: got shape \(4, 10\), expected \(10, 4\)"):
        TokenEmbedding(10, 4, init=torch.ones(4, 10))


def test_tied_projection_with_wrong_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"projection: got weight \(4, 10\), expected \(10, 4\)"):
        TokenEmbedding(10, 4).tie(nn.Linear(10, 4))
