"""The token table."""

import math

import torch
from torch import nn

from preblock.models.modules.tokens import TokenEmbedding
from tests.models.rejections import rejection

IDS = torch.tensor([[3, 0, 9], [9, 9, 1]])


def test_token_table_lookup_equals_scaled_torch_embedding() -> None:
    for scale, factor in ((True, math.sqrt(7)), (3.0, 3.0), (1.0, 1.0), (False, 1.0)):
        table = TokenEmbedding(10, 7, scale=scale)
        assert torch.equal(table(IDS), nn.Embedding(10, 7, _weight=table.weight)(IDS) * factor), scale


def test_pretrained_values_are_copied_with_padding_row() -> None:
    pretrained = torch.randn(10, 4)
    before, table = pretrained.clone(), TokenEmbedding(10, 4, padding_idx=9, init=pretrained)
    assert torch.equal(table.weight, pretrained)
    table(IDS).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()
    assert torch.equal(pretrained, before)
    assert not torch.equal(table.weight, before)
    assert not TokenEmbedding(10, 4, init=pretrained, freeze=True)(IDS).requires_grad


def test_tied_table_sums_gradients_of_both_uses() -> None:
    pretrained = torch.randn(10, 4)
    tied, projection = TokenEmbedding(10, 4, init=pretrained), nn.Linear(4, 10, bias=False)
    tied.tie(projection)
    assert projection.weight is tied.weight
    projection(tied(IDS)).sum().backward()
    # Apart, torch gives each side its own gradient; tied, they add up.
    table, output = nn.Embedding(10, 4, _weight=pretrained.clone()), nn.Linear(4, 10, bias=False)
    output.weight.data.copy_(pretrained)
    output(table(IDS)).sum().backward()
    assert table.weight.grad is not None
    assert output.weight.grad is not None
    torch.testing.assert_close(tied.weight.grad, table.weight.grad + output.weight.grad)


def test_invalid_token_table_arguments_are_rejected() -> None:
    for padding_idx in (-1, 10):
        message = f"padding_idx: got {padding_idx}, expected 0 to 9"
        assert rejection(ValueError, TokenEmbedding, 10, 4, padding_idx=padding_idx) == message
    message = "projection: got weight (4, 10), expected (10, 4)"
    assert rejection(ValueError, TokenEmbedding(10, 4).tie, nn.Linear(10, 4)) == message
