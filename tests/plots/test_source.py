"""The numbers of a source: of artifacts against their modules, of modules against their formulas."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from preblock import models, plots
from preblock.service.core.errors import Invalid
from tests.data.make_artifacts import build_frontend
from tests.support.artifacts import copy_artifact


def test_artifact_wavelengths_equal_formula(model_repository: Path, tmp_path: Path) -> None:
    source = plots.read_artifact(model_repository / "transformer-base" / "1")
    wavelengths = 2 * np.pi * 10000 ** (np.arange(256) / 256)
    assert np.allclose(source.wavelengths["positions"], wavelengths, rtol=1e-12)
    rotary = plots.read_artifact(copy_artifact("llama", tmp_path)).wavelengths["rotary"]
    assert np.allclose(rotary, 2 * np.pi * 10000 ** (np.arange(3) / 3), rtol=1e-6)


@pytest.mark.parametrize("name", ["bert", "counts-slots", "rotary", "alibi", "t5"])
def test_artifact_source_equals_module_source(name: str, tmp_path: Path) -> None:
    stored, module = plots.read_artifact(copy_artifact(name, tmp_path)), plots.read_module(build_frontend(name))
    for part, arguments in (("positions", (1, 5)), ("bias", (9,)), ("tokens", (np.array([1, 5]),))):
        found, expected = getattr(stored, part), getattr(module, part)
        assert (found is None) == (expected is None), part
        assert found is None or np.array_equal(found(*arguments), expected(*arguments)), part
    assert list(stored.wavelengths) == list(module.wavelengths)
    for key, values in stored.wavelengths.items():
        assert np.allclose(values, module.wavelengths[key], rtol=1e-6)
    assert sum(stored.parameters.values()) == sum(module.parameters.values())


@pytest.mark.parametrize(
    ("module", "name", "base"),
    [
        (models.RotaryEmbedding(models.RotaryConfig(dim=8, theta=500.0)), "rotary", 500.0),
        (models.SinusoidalPositionalEncoding(8, 4, base=100.0), "positions", 100.0),
        (models.HybridPositionalEncoding(8, 4, base=100.0), "positions", 100.0),
    ],
)
def test_wavelengths_follow_the_formula(module: nn.Module, name: str, base: float) -> None:
    expected = 2 * np.pi * base ** (np.arange(4) / 4)
    assert np.allclose(plots.read_module(module).wavelengths[name], expected, rtol=1e-6)


def test_module_rows_are_those_of_its_table() -> None:
    """Without dropout; of a grid the cells."""
    dropping, grid = models.LearnedPositionalEncoding(4, 6, dropout=0.9), models.LearnedGridEncoding(4, 2, 3)
    for module in (dropping.train(), grid):
        source = plots.read_module(module)
        assert source.positions is not None
        assert source.max_len == 6
        assert np.array_equal(source.positions(2, 3), module.weight.numpy(force=True)[2:5])
        assert module.training
    tokens = models.TokenEmbedding(5, 4)
    source = plots.read_module(tokens)
    assert source.tokens is not None
    assert np.array_equal(source.tokens(np.array([4, 1])), tokens.weight.numpy(force=True)[[4, 1]])


def test_unknown_sources_are_rejected() -> None:
    with pytest.raises(Invalid, match="module: got Linear, expected a front-end, TokenEmbedding"):
        plots.read_module(torch.nn.Linear(2, 2))
    with pytest.raises(Invalid, match="preset: got 'gpt9', expected gpt2-small, transformer-base"):
        plots.read_preset("gpt9")
