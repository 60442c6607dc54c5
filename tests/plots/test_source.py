"""The numbers of a source: of artifacts against their tables as onnx reads them, of modules against their formulas."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from preblock import models, plots
from preblock.service.core.errors import Invalid
from tests.data.make_artifacts import build_frontend
from tests.support.artifacts import copy_artifact, read_tables

FIRST_ROWS = {"gpt": 0, "bert": 0, "counts-slots": 2, "counts-ids": 2, "counts-mask": 2, "projected": 0, "segments": 0}
"""Artifacts with positions, and their row of position 0."""


@pytest.mark.parametrize("name", [*FIRST_ROWS, "llama", "alibi"])
def test_artifact_rows_equal_its_tables(name: str, tmp_path: Path) -> None:
    folder = copy_artifact(name, tmp_path)
    source, tables = plots.read_artifact(folder), read_tables(folder)
    assert source.tokens is not None
    assert source.vocab_size == len(tables["tokens"])
    assert np.array_equal(source.tokens(np.array([3, 0, 6])), tables["tokens"][[3, 0, 6]])
    assert (source.positions is None) == (name not in FIRST_ROWS)
    if source.positions is not None:
        assert source.max_len is not None
        table = tables["positions"][FIRST_ROWS[name] :]
        assert np.array_equal(source.positions(0, source.max_len), table[: source.max_len])
        assert np.array_equal(source.positions(3, 2), table[3:5])
    if name == "bert":
        expected = {f"{step}.weight": table.size for step, table in tables.items()}
        assert dict(source.parameters) == expected | {"norm.weight": 4, "norm.bias": 4}
    if name == "llama":
        assert np.allclose(source.wavelengths["rotary"], 2 * np.pi * 10000 ** (np.arange(3) / 3), rtol=1e-6)


def test_artifact_sinusoids_equal_formula(model_repository: Path) -> None:
    source = plots.read_artifact(model_repository / "transformer-base" / "1")
    assert source.positions is not None
    wavelengths = 2 * np.pi * 10000 ** (np.arange(256) / 256)
    angles = np.arange(90, 100)[:, None] * 2 * np.pi / wavelengths
    rows = source.positions(90, 10)
    assert np.allclose(rows[:, 0::2], np.sin(angles), atol=1e-6)
    assert np.allclose(rows[:, 1::2], np.cos(angles), atol=1e-6)
    assert np.allclose(source.wavelengths["positions"], wavelengths, rtol=1e-12)


@pytest.mark.parametrize("name", ["bert", "segments", "rotary", "alibi", "t5"])
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


def test_alibi_bias_decreases_with_distance() -> None:
    source = plots.read_module(models.AlibiBias(8))
    assert source.bias is not None
    index = np.arange(6)
    slopes = 2.0 ** -np.arange(1, 9)  # Press et al. 2022, section 3
    assert np.array_equal(source.bias(6), slopes[:, None, None] * (index[None, :] - index[:, None]))


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
