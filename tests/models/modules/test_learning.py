"""The position modules learn a task with order, and their exports equal them.

The task: two of eight tokens are marked; name the first. Every input is the same bag of tokens in another order,
then one question token. A model without positions answers every input alike, and cannot come below the entropy of
the answer, log 2 = 0.693.
"""

import math
from collections.abc import Callable

import numpy as np
import onnxruntime
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


def cells(batch: int, length: int) -> Tensor:
    """Random indices of 2 rows and 4 columns."""
    return torch.stack((torch.randint(2, (batch, length)), torch.randint(4, (batch, length))), dim=-1)


@pytest.mark.filterwarnings("ignore")  # of the exporter's own deprecations
@pytest.mark.parametrize(
    ("module", "others"),
    [
        pytest.param(HybridPositionalEncoding(D, M), lambda _: {"offset": torch.tensor([M - 2])}, id="hybrid, offset"),
        pytest.param(
            HybridPositionalEncoding(D, M, base=12345.678),
            lambda x: {"position_ids": torch.randint(10**6, x.shape[:2]) * torch.randint(2, x.shape[:2])},
            id="hybrid, ids",
        ),
        pytest.param(
            HierarchicalPositionalEncoding(D, {"sentence": 2, "word": 4}),
            lambda x: {"position_ids": cells(*x.shape[:2])},
            id="hierarchical",
        ),
        *(
            pytest.param(kind(D, 2, 4), others, id=f"{kind.__name__}, {name}")
            for kind in (LearnedGridEncoding, SinusoidalGridEncoding, FactorisedGridEncoding)
            for name, others in (("whole", lambda _: {}), ("ids", lambda x: {"position_ids": cells(*x.shape[:2])}))
        ),
    ],
)
def test_exported_positions_with_dynamic_axes_match_torch(
    module: nn.Module, others: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    torch.manual_seed(0)
    # A whole grid has but one length.
    lengths = (3, 1, 7) if others(torch.zeros(1, 1, D)) else (8,) * 3
    samples = [torch.randn(batch, length, D) for batch, length in zip((2, 1, 5), lengths, strict=True)]
    inputs = [{"x": x, **others(x)} for x in samples]
    axes = {name: dict.fromkeys(range(tensor.ndim)[:2], torch.export.Dim.AUTO) for name, tensor in inputs[0].items()}
    program = torch.onnx.export(
        module.eval(), kwargs=inputs[0], dynamo=True, dynamic_shapes=axes, verbose=False, opset_version=20
    )
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for feed in inputs:
        found = session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})[0]
        assert np.array_equal(found, module(**feed).detach().numpy())
