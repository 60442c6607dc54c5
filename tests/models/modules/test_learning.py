"""The position modules learn a task with order.

The task: two of eight tokens are marked; name the first. Every input is the same bag of tokens in another order,
then one question token. A model without positions answers every input alike, and cannot come below the entropy of
the answer, log 2 = 0.693.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.grid import (
    FactorisedGridEncoding,
    LearnedGridEncoding,
    SinusoidalGridEncoding,
    grid_ids,
)
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from preblock.models.modules.relative_positions import T5RelativeBias
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate

D, HEADS, SIDE = 16, 4, 3
LENGTH = SIDE * SIDE
BASELINE = math.log(2)
LEARNED = 0.05
"""Well below what a model can reach that tells apart only the rows of the grid (0.17), or only the first M tokens or
only those beyond (0.15)."""

M = 4
READING_ORDER = grid_ids(SIDE, SIDE)
LEVELS = {"sentence": SIDE, "word": SIDE}


class Reader(nn.Module):
    """Tokens, attention of the last token to all, a hidden layer, a vote for each answer."""

    def __init__(self, positions: nn.Module, *arguments: Tensor) -> None:
        super().__init__()
        self.positions, self.arguments = positions, arguments
        self.tokens = nn.Embedding(LENGTH, D)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.hidden, self.vote = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.tokens(ids), None
        if not isinstance(self.positions, AlibiBias | RotaryEmbedding | T5RelativeBias):
            x = self.positions(x, *self.arguments)
        query, key, value = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if isinstance(self.positions, RotaryEmbedding):
            cos, sin = self.positions(x)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        elif isinstance(self.positions, AlibiBias | T5RelativeBias):
            bias = self.positions(LENGTH - 1, 1, LENGTH)
        read = functional.scaled_dot_product_attention(query[:, :, -1:], key, value, attn_mask=bias).flatten(1)
        votes: Tensor = self.vote(functional.relu(self.hidden(read)))
        return votes


def draw(inputs: int) -> tuple[Tensor, Tensor]:
    """Orders of the eight tokens, each also with the marked 0 and 1 exchanged; and whether 0 comes first."""
    orders = torch.rand(inputs // 2, LENGTH - 1).argsort(dim=1)
    orders = torch.cat((orders, torch.where(orders < 2, 1 - orders, orders)))
    zero_first = (orders == 0).int().argmax(dim=1) < (orders == 1).int().argmax(dim=1)
    return functional.pad(orders, (0, 1), value=LENGTH - 1), zero_first.long()


def loss_after_training(reader: Reader) -> float:
    """Return the cross-entropy on orders outside of training."""
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
    for _ in range(300):
        ids, answers = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(reader(ids), answers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ids, answers = draw(2048)
    with torch.no_grad():
        return functional.cross_entropy(reader.eval()(ids), answers).item()


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Reader(LearnedPositionalEncoding(D, LENGTH, dropout=0.0)), id="learned"),
        pytest.param(lambda: Reader(SinusoidalPositionalEncoding(D, LENGTH, dropout=0.0)), id="sinusoidal"),
        pytest.param(lambda: Reader(HybridPositionalEncoding(D, M, dropout=0.0)), id="hybrid"),
        pytest.param(lambda: Reader(LearnedGridEncoding(D, SIDE, SIDE, dropout=0.0)), id="grid, learned"),
        pytest.param(lambda: Reader(SinusoidalGridEncoding(D, SIDE, SIDE, dropout=0.0)), id="grid, sinusoidal"),
        pytest.param(lambda: Reader(FactorisedGridEncoding(D, SIDE, SIDE, dropout=0.0)), id="grid, factorised"),
        pytest.param(
            lambda: Reader(HierarchicalPositionalEncoding(D, LEVELS, dropout=0.0), READING_ORDER), id="hierarchical"
        ),
        # With so small a theta, the second of the two wavelengths is longer than the nine tokens.
        pytest.param(lambda: Reader(RotaryEmbedding(RotaryConfig(dim=D // HEADS, theta=64.0))), id="rotary"),
        pytest.param(lambda: Reader(AlibiBias(HEADS)), id="ALiBi"),
        pytest.param(lambda: Reader(T5RelativeBias(HEADS, 32, 128, bidirectional=False)), id="T5"),
    ],
)
def test_every_position_kind_learns_token_order(build: Callable[[], Reader]) -> None:
    torch.manual_seed(0)
    assert loss_after_training(build()) < LEARNED


def test_model_without_positions_cannot_learn_token_order() -> None:
    torch.manual_seed(0)
    assert loss_after_training(Reader(nn.Identity())) > BASELINE - 1e-4
