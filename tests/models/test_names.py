"""The public names of `preblock.models`, and the representation of its modules."""

import pytest
from torch import nn

from preblock import models


def test_public_names_are_sorted_and_importable() -> None:
    assert models.__all__ == sorted(models.__all__)
    assert [getattr(models, name).__name__ for name in models.__all__] == models.__all__
    with pytest.raises(AttributeError, match="has no attribute 'TokenTable'"):
        _ = models.TokenTable  # type: ignore[attr-defined]


AUDIO = models.AudioConfig(family="a", width=4, channels=2, positions=3)
PATCHES = models.PatchConfig(family="p", width=4, channels=3, image_size=4, patch_size=2)


def test_module_repr_names_its_sizes() -> None:
    modules: list[tuple[nn.Module, str]] = [
        (models.AlibiBias(4), "heads=4, anchor='query'"),
        (models.AudioStem(AUDIO), "family='a', width=4, positions=3"),
        (models.BertEmbeddings(9, 4, 6), "family='bert', vocab_size=9, d_model=4, max_len=6"),
        (models.FactorisedGridEncoding(4, 2, 3), "height=2, width=3"),
        (models.HierarchicalPositionalEncoding(4, {"word": 5}), "levels={'word': 5}"),
        (models.HybridPositionalEncoding(4, 6), "max_len=6, d_model=4"),
        (models.LearnedGridEncoding(4, 2, 3), "height=2, width=3, d_model=4"),
        (models.LearnedPositionalEncoding(4, 6), "max_len=6, d_model=4"),
        (models.PatchStem(PATCHES), "family='p', width=4, image_size=4"),
        (models.RelativeSinusoid(4), "d_model=4, clamp_len=None, bidirectional=True"),
        (models.RotaryEmbedding(models.RotaryConfig(dim=4)), "dim=4, theta=10000, scaling='default'"),
        (models.SinusoidalGridEncoding(4, 2, 3), "height=2, width=3"),
        (models.SinusoidalPositionalEncoding(4, 6), "max_len=6, d_model=4"),
        (models.T5RelativeBias(2), "heads=2, buckets=32, max_distance=128, bidirectional=True"),
        (models.TokenEmbedding(9, 4, True, 1), "vocab_size=9, d_model=4, scale=2, padding_idx=1"),
        (models.TokenEmbedding(9, 4), "vocab_size=9, d_model=4"),
    ]
    for module, sizes in modules:
        assert module.extra_repr() == sizes
