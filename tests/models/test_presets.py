"""Presets and seeded weights, against numpy's own stream of numbers."""

import numpy as np
import pytest
import torch

from preblock.models.embeddings import GPT2Embeddings, TransformerEmbedding
from preblock.models.presets import PRESETS, preset_data

SHAPES = {
    "gpt2-small": {"tokens.weight": (50257, 768), "positions.weight": (1024, 768)},
    "transformer-base": {"tokens.weight": (32000, 512)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_preset_weights_equal_numpy_stream_of_seed(name: str) -> None:
    generator, weights = np.random.Generator(np.random.PCG64(PRESETS[name].seed)), preset_data(name).tensors
    assert list(weights) == list(SHAPES[name])
    for table, shape in SHAPES[name].items():
        expected = generator.standard_normal(shape, np.float32) * np.float32(0.02)
        assert np.array_equal(weights[table], expected), table


def test_presets_are_those_of_their_classes() -> None:
    with torch.device("meta"):
        built = {
            "gpt2-small": GPT2Embeddings(50257, 768, 1024),
            "transformer-base": TransformerEmbedding(32000, 512, 4096),
        }
        assert {name: preset.config for name, preset in PRESETS.items()} == {n: f.config for n, f in built.items()}
