"""Presets and seeded weights, against numpy's own stream of numbers."""

import numpy as np
import pytest
import torch

from preblock.models.embeddings import BertEmbeddings
from preblock.models.modules.initialisers import seeded_
from preblock.models.presets import PRESETS, build_preset


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("gpt2-small", {"tokens.weight": (50257, 768), "positions.weight": (1024, 768)}),
        ("transformer-base", {"tokens.weight": (32000, 512)}),
    ],
)
def test_preset_weights_equal_numpy_stream_of_seed(name: str, tables: dict[str, tuple[int, int]]) -> None:
    generator = np.random.Generator(np.random.PCG64(PRESETS[name].seed))
    weights = build_preset(name).state_dict()
    assert list(weights) == list(tables)
    for table, shape in tables.items():
        expected = generator.standard_normal(shape, np.float32) * np.float32(0.02)
        assert np.array_equal(weights[table].numpy(), expected), table


@pytest.mark.parametrize(("name", "max_len"), [("gpt2-small", 1024), ("transformer-base", 4096)])
def test_preset_max_len_equals_published_value(name: str, max_len: int) -> None:
    with torch.device("meta"):
        config = PRESETS[name].build().config
    assert config.max_len == max_len


def test_seed_determines_the_weights() -> None:
    first, second, other = (BertEmbeddings(11, 4, 8) for _ in range(3))
    for frontend, seed in ((first, 5), (second, 5), (other, 6)):
        torch.manual_seed(seed * 100)
        seeded_(frontend, seed)
    for name in ("tokens.weight", "segments.weight", "positions.weight"):
        assert torch.equal(first.state_dict()[name], second.state_dict()[name])
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_seeding_does_not_change_norm() -> None:
    frontend = BertEmbeddings(11, 4, 8)
    seeded_(frontend, 1)
    assert frontend.norm is not None
    assert frontend.norm.weight.tolist() == [1.0] * 4
    assert frontend.norm.bias.tolist() == [0.0] * 4


def test_unknown_preset_is_rejected() -> None:
    with pytest.raises(KeyError):
        build_preset("gpt3")
