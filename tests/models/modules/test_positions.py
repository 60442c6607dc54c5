"""Position modules of sequences: learned, sinusoidal and hybrid. Oracles: torch's embedding, and transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.modules.grid import FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from preblock.models.modules.sinusoids import sinusoid
from tests.models.rejections import rejection

SEQUENCE = (LearnedPositionalEncoding, SinusoidalPositionalEncoding, HybridPositionalEncoding)
Module = LearnedPositionalEncoding | SinusoidalPositionalEncoding | HybridPositionalEncoding
KINDS = pytest.mark.parametrize("kind", SEQUENCE)
D, M, FAR = 6, 10, 40
NO_IDS = torch.zeros((1, FAR), dtype=torch.int64)
"""Ids of tokens: a module returns its vectors alone."""


def rows_of(module: Module) -> Tensor:
    """The vectors of the positions 0 to FAR - 1, or to M - 1: (FAR or M, D)."""
    sinusoids: Tensor = create_sinusoidal_embeddings(FAR, D, torch.empty(FAR, D))
    if isinstance(module, SinusoidalPositionalEncoding):
        return sinusoids
    learned = nn.Embedding(M, D, _weight=module.weight)(torch.arange(M))
    return torch.cat((learned, sinusoids[M:])) if isinstance(module, HybridPositionalEncoding) else learned


@KINDS
def test_offset_and_ids_select_positions(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(3, 2, D)
    own, rows = module(NO_IDS[:, :M])[0], rows_of(module)[:M]
    assert kind is not LearnedPositionalEncoding or torch.equal(own, rows)
    torch.testing.assert_close(own, rows, rtol=0, atol=1e-6)
    for given, positions in (
        ({}, [0, 1]),
        ({"offset": 3}, [3, 4]),
        ({"offset": M - 2}, [M - 2, M - 1]),
        ({"offset": torch.tensor([3])}, [3, 4]),
        ({"offset": torch.tensor([0, 8, 3])}, [[0, 1], [8, 9], [3, 4]]),
        ({"position_ids": torch.tensor([[7, 0]])}, [7, 0]),
        ({"position_ids": torch.tensor([[7, 0], [9, 9], [1, 3]])}, [[7, 0], [9, 9], [1, 3]]),
    ):
        assert torch.equal(module(x, **given), x + own[torch.tensor(positions)]), given


@pytest.mark.parametrize("kind", [SinusoidalPositionalEncoding, HybridPositionalEncoding])
def test_positions_beyond_rows_are_sinusoids(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(3, 2, D)
    rows = rows_of(module)
    torch.testing.assert_close(module(NO_IDS)[0], rows, rtol=0, atol=2e-7)
    found = module(x, offset=torch.tensor([0, M - 1, 30]))
    expected = x + torch.stack((rows[:2], rows[M - 1 : M + 1], rows[30:32]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    far = torch.tensor([[10**6, 2**31 - 1]])
    assert torch.equal(module(NO_IDS[:, :2], far)[0], sinusoid(far[0], D))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@KINDS
def test_invalid_offset_or_position_ids_are_rejected(kind: type[Module]) -> None:
    module, x = kind(D, M), torch.randn(2, 4, D)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"offset": -1}, "offset: got -1, expected 0 or more"),
        ({"offset": torch.tensor([2, -1])}, "offset: got -1, expected 0 or more"),
        *(({"offset": zeros(*shape)}, "offset: got shape") for shape in ((3,), (2, 1), (2, 2), (2, 1, 1))),
        ({"position_ids": torch.tensor([[1, -2, 0, 0]])}, "position_ids: got -2, expected 0 or more"),
        *(
            ({"position_ids": zeros(*shape)}, f"position_ids: got shape {shape}, expected (1, 4) or (2, 4)")
            for shape in ((4,), (3, 4), (2, 3), (1, 2, 4))
        ),
        ({"position_ids": zeros(1, 4), "offset": 1}, "exclude each other"),
        ({"position_ids": zeros(1, 4), "offset": torch.tensor([0])}, "exclude each other"),
    ]
    for given, message in cases:
        assert message in rejection(ValueError, module, x, **given), given


def test_position_beyond_learned_table_is_rejected() -> None:
    module = LearnedPositionalEncoding(D, M)
    for length, offset, named in (
        (M + 1, 0, 0),
        (1, M, M),
        (4, torch.tensor([0, M - 3]), M - 3),
        (1, 2**62, 2**62),
    ):
        message = f"length {length} + offset {named} = {length + named} exceeds the maximum length {M}"
        assert rejection(ValueError, module, torch.randn(2, length, D), offset=offset) == message
    ids = torch.tensor([[0, M]])
    assert rejection(ValueError, module, NO_IDS[:, :2], ids) == "position_ids: got 10, expected 0 to 9"


EVERY: dict[str, Callable[..., nn.Module]] = {
    **{kind.__name__: lambda kind=kind, **given: kind(64, 50, **given) for kind in SEQUENCE},
    **{
        kind.__name__: lambda kind=kind, **given: kind(64, 5, 10, **given)
        for kind in (LearnedGridEncoding, SinusoidalGridEncoding, FactorisedGridEncoding)
    },
    "hierarchical": lambda **given: HierarchicalPositionalEncoding(64, {"sentence": 5, "word": 10}, **given),
}


@pytest.mark.parametrize("name", EVERY)
def test_dropout_applies_after_sum_only_in_training(name: str) -> None:
    torch.manual_seed(0)
    module, x = EVERY[name](dropout=0.5), torch.randn(8, 50, 64, requires_grad=True)
    given = (torch.randint(5, (8, 50, 2)),) if name == "hierarchical" else ()
    expected = x + module(zeros(8, 50), *given)
    assert torch.equal(module.eval()(x, *given), expected)
    found = module.train()(x, *given)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52
    found.sum().backward()
    assert all(table.grad is not None and table.grad.any() for table in module.parameters())


@pytest.mark.parametrize("kind", [LearnedPositionalEncoding, HybridPositionalEncoding])
def test_only_used_table_rows_have_gradient(kind: type[Module]) -> None:
    module, x = kind(D, M, dropout=0.0), torch.randn(3, 2, D, requires_grad=True)
    module(x, offset=torch.tensor([0, 1, 1])).sum().backward()
    gradients = [1, 3, 2, *[0] * (M - 3)]
    if kind is HybridPositionalEncoding:
        # Positions beyond the table leave its last row alone, which one position uses.
        module(x, offset=M - 1).sum().backward()
        gradients[-1] = 3
    (weight,) = module.parameters()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == gradients
    assert x.grad is not None
    assert x.grad.min() == x.grad.max() == (1 if kind is LearnedPositionalEncoding else 2)


def test_base_and_padded_width_reach_sinusoids() -> None:
    for kind in (SinusoidalPositionalEncoding, HybridPositionalEncoding):
        assert "d_model: got 7, expected an even width" in rejection(ValueError, kind, 7, M)
        found = kind(7, M, base=500.0, pad_odd=True)(NO_IDS)[0]
        assert torch.equal(found[M:], sinusoid(torch.arange(M, FAR), 7, 500.0, True))
    assert torch.equal(SinusoidalPositionalEncoding(8, 2100).table, sinusoid(torch.arange(2100), 8))
    warm = HybridPositionalEncoding(D, M, init="sinusoidal")
    assert torch.equal(warm(NO_IDS), SinusoidalPositionalEncoding(D, 0)(NO_IDS))
    assert "max_len: got 0, expected 1 or more" in rejection(ValueError, HybridPositionalEncoding, D, 0)
