"""The values in figures, against numpy."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context

from preblock import plots
from preblock.cli import plot as command
from preblock.plots.figures import KINDS, cosine_similarity, principal_components
from preblock.service.core.errors import Invalid
from tests.support.artifacts import copy_artifact, read_tables

ROWS = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)


def source(**parts: object) -> plots.PlotSource:
    return plots.PlotSource(name="model", **parts)  # type: ignore[arg-type]


def test_heatmap_and_similarity_show_position_table(tmp_path: Path) -> None:
    assert tuple(KINDS) == command.KINDS
    folder = copy_artifact("gpt", tmp_path)
    rows, read = read_tables(folder)["positions"], plots.read_artifact(folder)
    (image,) = plots.heatmap(read).axes[0].images
    assert np.array_equal(np.asarray(image.get_array()), rows)
    low, high = image.get_clim()
    assert low == -high
    (image,) = plots.similarity(read).axes[0].images
    expected = [[a @ b / np.sqrt((a @ a) * (b @ b)) for b in rows.astype(float)] for a in rows.astype(float)]
    assert np.allclose(np.asarray(image.get_array()), expected, atol=1e-12)
    assert cosine_similarity(np.array([[0.0, 0.0], [3.0, 4.0]])).tolist() == [[0, 0], [0, 1]]


def test_principal_components_equal_covariance_eigenvectors() -> None:
    points, shares = principal_components(ROWS)
    values, vectors = np.linalg.eigh(np.cov(ROWS.T.astype(np.float64)))
    expected = (ROWS - ROWS.mean(0, dtype=np.float64)) @ vectors[:, [-1, -2]]
    assert np.allclose(np.abs(points), np.abs(expected), atol=1e-9)
    assert np.allclose(shares, values[[-1, -2]] / values.sum())


def test_pca_of_large_vocabulary_plots_1000_tokens() -> None:
    seen: list[int] = []

    def tokens(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> object:
        seen.extend(ids.tolist())
        return np.stack((ids, ids**2), axis=1).astype(np.float32)

    (dots,) = plots.pca(source(tokens=tokens, vocab_size=50_000)).axes[0].collections
    assert (len(seen), seen[0], seen[-1]) == (1000, 0, 49_999)
    assert np.asarray(dots.get_offsets()).shape == (1000, 2)


def test_parameter_bars_show_counts_and_shares() -> None:
    axes = plots.parameters(source(parameters={"tokens": 30, "positions": 10})).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [30, 10]  # type: ignore[attr-defined]
    assert [text.get_text() for text in axes.texts] == ["30 (75.0%)", "10 (25.0%)"]


def test_figure_kind_without_data_is_rejected() -> None:
    for kind, missing in (
        ("heatmap", "position vectors"),
        ("similarity", "position vectors"),
        ("pca", "known token vectors"),
        ("wavelengths", "sinusoids and no rotary frequencies"),
        ("bias", "attention bias by distance"),
    ):
        with pytest.raises(Invalid, match=f"^model has no {missing}; expected parameters$"):
            KINDS[kind].draw(source(parameters={"tokens": 1}))
    with pytest.raises(Invalid, match="model has no trained table; expected another model"):
        plots.parameters(source())


def test_user_matplotlib_settings_do_not_change_figures(tmp_path: Path) -> None:
    read = plots.read_artifact(copy_artifact("gpt", tmp_path))
    plots.save(plots.heatmap(read), tmp_path / "plain.svg")
    with rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "none", "image.cmap": "gray"}):
        plots.save(plots.heatmap(read), tmp_path / "changed.svg")
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "changed.svg").read_bytes()
