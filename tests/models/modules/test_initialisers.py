"""How a position table may start."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.embeddings import (
    BertEmbeddings,
    GPT2Embeddings,
    GridEmbedding,
    HierarchicalEmbedding,
    HybridEmbedding,
    TransformerEmbedding,
)
from preblock.models.modules.grid import FactorisedGridEncoding, LearnedGridEncoding
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.initialisers import Initialiser
from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from preblock.models.modules.relative_positions import T5RelativeBias
from preblock.models.modules.stems import AudioConfig, AudioStem, PatchConfig, PatchStem
from preblock.models.modules.tokens import TokenEmbedding
from tests.models.rejections import rejection

D, M = 256, 512


def started(init: Initialiser | Tensor) -> nn.Parameter:
    """The table of learned positions after the initialiser `init`."""
    torch.manual_seed(0)
    return LearnedPositionalEncoding(D, M, init=init).weight


def test_normal_init_has_std_of_bert_and_gpt2() -> None:
    table = started("normal").detach().numpy()
    assert abs(table.mean()) < 2e-4
    assert abs(table.std() - 0.02) < 2e-4
    # Of a normal distribution 95.45 % lies within two standard deviations.
    assert abs(np.mean(np.abs(table) < 0.04) - 0.9545) < 2e-3


def test_xavier_init_is_uniform_up_to_bound() -> None:
    table, bound = started("xavier_uniform").detach().numpy(), math.sqrt(6 / (M + D))
    assert 0.999 * bound < np.abs(table).max() <= bound
    counts, _ = np.histogram(table, bins=8, range=(-bound, bound))
    assert np.abs(counts / table.size - 1 / 8).max() < 3e-3


def test_sinusoidal_init_matches_transformers() -> None:
    expected = create_sinusoidal_embeddings(M, D, torch.empty(M, D))
    torch.testing.assert_close(started("sinusoidal").detach(), expected, rtol=0, atol=6e-8)
    assert torch.equal(started("sinusoidal"), SinusoidalPositionalEncoding(D, M).table)
    message = rejection(ValueError, LearnedPositionalEncoding, 7, 10, init="sinusoidal")
    assert "d_model: got 7, expected an even width" in message


PATCHES = PatchConfig(family="p", width=D, channels=1, image_size=16, patch_size=1)
SPECTROGRAM = AudioConfig(family="a", width=D, channels=1, positions=M)
OWNERS: dict[str, Callable[..., nn.Module]] = {
    "tokens": partial(TokenEmbedding, M, D),
    "learned": partial(LearnedPositionalEncoding, D, M),
    "hybrid": partial(HybridPositionalEncoding, D, M),
    "grid": partial(LearnedGridEncoding, D, 16, 32),
    "factorised grid": partial(FactorisedGridEncoding, D, 400, 300),
    "hierarchical": partial(HierarchicalPositionalEncoding, D, {"word": M}),
    "t5": partial(T5RelativeBias, 64, 512, 1000),
    "patches": partial(PatchStem, PATCHES),
    "audio": partial(AudioStem, SPECTROGRAM),
    "transformer": partial(TransformerEmbedding, M, D, M),
    "bert": partial(BertEmbeddings, M, D, M, segments=M, padding_idx=None),
    "gpt2": partial(GPT2Embeddings, M, D, M),
    "hybrid embedding": partial(HybridEmbedding, M, D, M, 2 * M),
    "grid embedding": partial(GridEmbedding, M, D, (400, 300), "factorised"),
    "hierarchical embedding": partial(HierarchicalEmbedding, M, D, {"word": M}),
}


def tables(module: nn.Module) -> list[nn.Parameter]:
    found = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    assert found
    return found


@pytest.mark.parametrize("build", OWNERS.values(), ids=OWNERS)
def test_init_and_std_apply_to_every_table(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    for table in tables(build(std=0.5)):
        assert abs(table.detach().double().std() - 0.5) < 0.01
    for table in tables(build(init="zeros")):
        assert not table.any()
    message = "init: got 'pretrained', expected normal, xavier_uniform"
    assert message in rejection(ValueError, build, init="pretrained")


def test_std_out_of_range_is_rejected() -> None:
    for std in (0.0, -1.0, math.inf, math.nan):
        assert "expected a number above 0" in rejection(ValueError, LearnedPositionalEncoding, D, M, std=std)


@pytest.mark.parametrize("name", ["tokens", "learned", "hybrid", "grid"])
def test_init_tensor_is_copied(name: str) -> None:
    values = torch.randn(M, D)
    (table,) = tables(OWNERS[name](init=values))
    assert torch.equal(table, values)
    assert table.data_ptr() != values.data_ptr()
    assert "pretrained: got shape (2, 3), expected" in rejection(ValueError, OWNERS[name], init=torch.zeros(2, 3))


IDS = torch.tensor([[3, 0, 9], [9, 9, 1]])


def test_token_table_lookup_equals_scaled_torch_embedding() -> None:
    for scale, factor in ((True, math.sqrt(7)), (3.0, 3.0), (1.0, 1.0), (False, 1.0)):
        table = TokenEmbedding(10, 7, scale=scale)
        assert torch.equal(table(IDS), nn.Embedding(10, 7, _weight=table.weight)(IDS) * factor), scale


def test_padding_row_is_that_of_given_values() -> None:
    values = torch.randn(10, 4)
    assert torch.equal(TokenEmbedding(10, 4, padding_idx=9, init=values).weight, values)
    assert not TokenEmbedding(10, 4, init=values, freeze=True)(IDS).requires_grad


def test_tied_projection_shares_the_table() -> None:
    tied, projection = TokenEmbedding(10, 4), nn.Linear(4, 10, bias=False)
    tied.tie(projection)
    assert projection.weight is tied.weight


def test_invalid_token_table_arguments_are_rejected() -> None:
    for padding_idx in (-1, 10):
        message = f"padding_idx: got {padding_idx}, expected 0 to 9"
        assert rejection(ValueError, TokenEmbedding, 10, 4, padding_idx=padding_idx) == message
    message = "projection: got weight (4, 10), expected (10, 4)"
    assert rejection(ValueError, TokenEmbedding(10, 4).tie, nn.Linear(10, 4)) == message
