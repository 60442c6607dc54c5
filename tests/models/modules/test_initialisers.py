"""How a position table may start."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.modules.initialisers import INITIALISERS, pretrained_, sinusoidal_
from preblock.models.modules.positions import LearnedPositions, SinusoidalPositions

D, M = 256, 512


def started(name: str, *arguments: Tensor | float) -> nn.Parameter:
    """The table of learned positions after the initialiser `name`."""
    torch.manual_seed(0)
    table = LearnedPositions(D, M).weight
    INITIALISERS[name](table, *arguments)
    return table


def test_every_start_has_a_name() -> None:
    assert list(INITIALISERS) == ["normal", "xavier_uniform", "zeros", "sinusoidal", "pretrained"]


def test_normal_has_the_standard_deviation_of_bert_and_gpt2() -> None:
    table = started("normal").detach().numpy()
    assert abs(table.mean()) < 2e-4
    assert abs(table.std() - 0.02) < 2e-4
    # Of a normal distribution 95.45 % lies within two standard deviations.
    assert abs(np.mean(np.abs(table) < 0.04) - 0.9545) < 2e-3


def test_xavier_is_uniform_up_to_its_bound() -> None:
    table, bound = started("xavier_uniform").detach().numpy(), math.sqrt(6 / (M + D))
    assert 0.999 * bound < np.abs(table).max() <= bound
    counts, _ = np.histogram(table, bins=8, range=(-bound, bound))
    assert np.abs(counts / table.size - 1 / 8).max() < 3e-3


def test_zeros_add_nothing() -> None:
    module, x = LearnedPositions(8, 10).eval(), torch.randn(2, 10, 8)
    INITIALISERS["zeros"](module.weight)
    assert torch.equal(module(x), x)


def test_the_sinusoidal_start_is_transformers_table() -> None:
    expected = create_sinusoidal_embeddings(M, D, torch.empty(M, D))
    torch.testing.assert_close(started("sinusoidal").detach(), expected, rtol=0, atol=6e-8)


def test_the_base_of_the_sinusoidal_start_is_selectable() -> None:
    assert torch.equal(started("sinusoidal", 500.0), SinusoidalPositions(D, M, base=500.0).table)
    assert not torch.equal(started("sinusoidal", 500.0), started("sinusoidal"))


def test_pretrained_values_are_copied() -> None:
    values = torch.randn(M, D)
    table = started("pretrained", values)
    assert torch.equal(table, values)
    values.zero_()
    assert table.abs().min() > 0


@pytest.mark.parametrize("name", ["normal", "xavier_uniform", "zeros", "sinusoidal", "pretrained"])
def test_every_start_is_trained_further(name: str) -> None:
    table = started(name, *([torch.randn(M, D)] if name == "pretrained" else []))
    assert table.is_leaf
    assert table.requires_grad
    table.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(table.grad if table.grad is not None else torch.zeros(0), torch.ones(M, D))


def test_sinusoids_of_an_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model: got 7, allowed an even width"):
        sinusoidal_(torch.empty(10, 7))


@pytest.mark.parametrize("shape", [(8, 10), (1, 8), (8,), (11, 8)])
def test_pretrained_values_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"values: got shape .*, allowed \(10, 8\)"):
        pretrained_(torch.empty(10, 8), torch.zeros(shape))
