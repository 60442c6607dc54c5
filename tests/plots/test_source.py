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


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_artifact_position_rows_equal_its_table(name: str, tmp_path: Path) -> None:
    folder = copy_artifact(name, tmp_path)
    source = plots.read_artifact(folder)
    assert source.positions is not None
    assert source.max_len is not None
    table = read_tables(folder)["positions"][FIRST_ROWS[name] :]
    assert np.array_equal(source.positions(0, source.max_len), table[: source.max_len])
    assert np.array_equal(source.positions(3, 2), table[3:5])


def test_artifact_sinusoids_equal_formula(model_repository: Path) -> None:
    source = plots.read_artifact(model_repository / "transformer-base" / "1")
    assert source.positions is not None
    wavelengths = 2 * np.pi * 10000 ** (np.arange(256) / 256)
    angles = np.arange(90, 100)[:, None] * 2 * np.pi / wavelengths
    rows = source.positions(90, 10)
    assert np.allclose(rows[:, 0::2], np.sin(angles), atol=1e-6)
    assert np.allclose(rows[:, 1::2], np.cos(angles), atol=1e-6)
    assert np.allclose(source.wavelengths["positions"], wavelengths, rtol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "bert", "llama", "alibi"])
def test_artifact_token_rows_equal_its_table(name: str, tmp_path: Path) -> None:
    folder = copy_artifact(name, tmp_path)
    source = plots.read_artifact(folder)
    assert source.tokens is not None
    table = read_tables(folder)["tokens"]
    assert source.vocab_size == len(table)
    assert np.array_equal(source.tokens(np.array([3, 0, 6])), table[[3, 0, 6]])


def test_artifact_parameter_counts_equal_table_sizes(tmp_path: Path) -> None:
    folder = copy_artifact("bert", tmp_path)
    expected = {f"{name}.weight": table.size for name, table in read_tables(folder).items()}
    assert dict(plots.read_artifact(folder).parameters) == expected | {"norm.weight": 4, "norm.bias": 4}


@pytest.mark.parametrize("name", ["bert", "segments", "rotary", "alibi", "t5"])
def test_artifact_source_equals_module_source(name: str, tmp_path: Path) -> None:
    stored, module = plots.read_artifact(copy_artifact(name, tmp_path)), plots.read_module(build_frontend(name))
    assert (stored.positions is None) == (module.positions is None)
    if stored.positions and module.positions:
        assert np.array_equal(stored.positions(1, 5), module.positions(1, 5))
    assert (stored.bias is None) == (module.bias is None)
    if stored.bias and module.bias:
        assert np.array_equal(stored.bias(9), module.bias(9))
    assert stored.tokens is not None
    assert module.tokens is not None
    ids = np.array([1, 5])
    assert np.array_equal(stored.tokens(ids), module.tokens(ids))
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


def test_rotary_wavelengths_follow_the_formula() -> None:
    source = plots.read_module(models.RotaryEmbedding(models.RotaryConfig(dim=8, theta=500.0)))
    assert np.allclose(source.wavelengths["rotary"], 2 * np.pi * 500.0 ** (np.arange(4) / 4), rtol=1e-6)


@pytest.mark.parametrize("kind", [models.SinusoidalPositionalEncoding, models.HybridPositionalEncoding])
def test_module_wavelengths_use_its_base(kind: type[nn.Module]) -> None:
    source = plots.read_module(kind(8, 4, base=100.0))
    assert np.allclose(source.wavelengths["positions"], 2 * np.pi * 100.0 ** (np.arange(4) / 4), rtol=1e-12)


def test_module_position_rows_ignore_dropout() -> None:
    module = models.LearnedPositionalEncoding(4, 6, dropout=0.9)
    source = plots.read_module(module.train())
    assert source.positions is not None
    assert np.array_equal(source.positions(2, 3), module.weight.numpy(force=True)[2:5])
    assert module.training


def test_grid_position_rows_are_its_cells() -> None:
    module = models.LearnedGridEncoding(4, 2, 3)
    source = plots.read_module(module)
    assert source.positions is not None
    assert source.max_len == 6
    assert np.array_equal(source.positions(0, 6), module.weight.numpy(force=True))


def test_token_embedding_source_returns_its_rows() -> None:
    module = models.TokenEmbedding(5, 4)
    source = plots.read_module(module)
    assert source.tokens is not None
    assert np.array_equal(source.tokens(np.array([4, 1])), module.weight.numpy(force=True)[[4, 1]])


def test_unsupported_module_is_rejected() -> None:
    with pytest.raises(Invalid, match="module: got Linear, expected a front-end, TokenEmbedding"):
        plots.read_module(torch.nn.Linear(2, 2))


def test_unknown_preset_is_rejected() -> None:
    with pytest.raises(Invalid, match="preset: got 'gpt9', expected gpt2-small, transformer-base"):
        plots.read_preset("gpt9")
