"""The pictures of a model, as matplotlib figures.

Letters: D width, H heads, L length, Q queries, K keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from preblock.plots.source import Floats, PlotSource
from preblock.service.core.errors import Invalid

DEFAULT_STYLE = style.context("default")
"""Draws without the settings of the user."""
MAX_POSITIONS = 512
"""Most positions of a picture, from position 0 on."""
MAX_TOKENS = 1000
"""Most tokens of a PCA, at equal distances in the vocabulary."""
BIAS_LENGTH = 64
"""Queries and keys of a picture of a bias."""
MAX_HEADS = 8
"""Most heads of a picture of a bias, from the first on."""


@dataclass(frozen=True)
class Kind:
    """A kind of picture.

    Args:
        draw: returns the figure of a source.
        needs: the part of a model that it shows, in words.
        has: whether a source has that part.

    """

    draw: Callable[[PlotSource], Figure]
    needs: str
    has: Callable[[PlotSource], bool]


@DEFAULT_STYLE
def heatmap(source: PlotSource) -> Figure:
    """Draw the values of the position rows: position by dimension.

    Raises:
        Invalid: the model adds no position vectors.

    """
    rows = _positions(source, "heatmap")
    figure, axes = _begin(f"{source.name}: position rows")
    most = float(np.abs(rows).max()) or 1.0
    image = axes.imshow(rows, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axes.set(xlabel="dimension", ylabel="position")
    figure.colorbar(image, label="value")
    return figure


@DEFAULT_STYLE
def similarity(source: PlotSource) -> Figure:
    """Draw the cosine similarity of every pair of positions.

    Raises:
        Invalid: the model adds no position vectors.

    """
    cosines = cosine_similarity(_positions(source, "similarity"))
    figure, axes = _begin(f"{source.name}: cosine similarity of positions")
    image = axes.imshow(cosines, cmap="viridis", vmax=1.0, interpolation="nearest")
    axes.set(xlabel="position", ylabel="position")
    figure.colorbar(image, label="cosine")
    return figure


@DEFAULT_STYLE
def pca(source: PlotSource) -> Figure:
    """Draw token vectors along their first two principal components, coloured by token id.

    Raises:
        Invalid: the token vectors of the model are unknown.

    """
    _check(source, "pca")
    assert source.tokens is not None
    count = min(MAX_TOKENS, source.vocab_size)
    ids = np.linspace(0, source.vocab_size - 1, count).astype(np.int64)
    points, shares = principal_components(source.tokens(ids))
    figure, axes = _begin(f"{source.name}: {count:,} of {source.vocab_size:,} token vectors")
    dots = axes.scatter(points[:, 0], points[:, 1], c=ids, cmap="viridis", s=6)
    axes.set(xlabel=f"component 1 ({shares[0]:.1%} of variance)", ylabel=f"component 2 ({shares[1]:.1%} of variance)")
    figure.colorbar(dots, label="token id")
    return figure


@DEFAULT_STYLE
def wavelengths(source: PlotSource) -> Figure:
    """Draw the wavelength of every pair of columns, in positions, on a logarithmic scale.

    Raises:
        Invalid: the model has neither sinusoids nor rotary frequencies.

    """
    _check(source, "wavelengths")
    figure, axes = _begin(f"{source.name}: wavelengths")
    for name, lengths in source.wavelengths.items():
        axes.plot(np.arange(len(lengths)), lengths, label=name, marker=".", markersize=4)
    if source.max_len is not None:
        axes.axhline(source.max_len, color="grey", linestyle="--", label=f"max_len {source.max_len:,}")
    axes.set(xlabel="pair of columns", ylabel="positions in a turn", yscale="log")
    axes.legend()
    return figure


@DEFAULT_STYLE
def bias(source: PlotSource) -> Figure:
    """Draw the attention bias of each head: query by key.

    Raises:
        Invalid: the model has no attention bias by distance.

    """
    _check(source, "bias")
    assert source.bias is not None
    heads = source.bias(BIAS_LENGTH)
    shown = heads[:MAX_HEADS]
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(2.4 * columns + 1, 2.2 * lines + 0.6), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    figure.suptitle(f"{source.name}: attention bias, {len(shown)} of {len(heads)} heads")
    most = float(np.abs(shown).max()) or 1.0
    for panel in grid.flat[len(shown) :]:
        panel.set_axis_off()
    for number, (panel, values) in enumerate(zip(grid.flat, shown, strict=False)):
        image = panel.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        panel.set_title(f"head {number}")
        panel.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=list(grid.flat), label="bias")
    return figure


@DEFAULT_STYLE
def parameters(source: PlotSource) -> Figure:
    """Draw the number of trained values of each table, and its share.

    Raises:
        Invalid: the model has no trained table.

    """
    _check(source, "parameters")
    names, counts = list(source.parameters), list(source.parameters.values())
    figure, axes = _begin(f"{source.name}: {sum(counts):,} parameters", height=1.4 + 0.45 * len(names))
    bars = axes.barh(names, counts)
    axes.bar_label(bars, [f"{count:,} ({count / sum(counts):.1%})" for count in counts], padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="trained values", xlim=(0, 1.4 * max(counts)))
    return figure


KINDS: Mapping[str, Kind] = {
    "heatmap": Kind(heatmap, "position vectors", lambda source: source.positions is not None),
    "similarity": Kind(similarity, "position vectors", lambda source: source.positions is not None),
    "pca": Kind(pca, "known token vectors", lambda source: source.tokens is not None and source.vocab_size > 1),
    "wavelengths": Kind(wavelengths, "sinusoids and no rotary frequencies", lambda source: bool(source.wavelengths)),
    "bias": Kind(bias, "attention bias by distance", lambda source: source.bias is not None),
    "parameters": Kind(parameters, "trained table", lambda source: bool(source.parameters)),
}
"""The kinds of pictures, by the name in the command."""


def cosine_similarity(rows: Floats) -> NDArray[np.float64]:
    """Return the cosine of every pair of rows (L, D): float64 (L, L). A row of zeros has cosine 0."""
    values = rows.astype(np.float64)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    unit = values / np.where(norms == 0, 1, norms)
    cosines: NDArray[np.float64] = unit @ unit.T
    return cosines


def principal_components(rows: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the first two principal components of `rows` (N, D), float64 (N, 2), and their shares of the variance.

    The largest weight of a component is positive, so that its sign is the same on every machine.
    """
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    if len(sizes) < 2:
        raise Invalid("pca", f"vectors of {rows.shape[1]} number", "two or more")
    top = directions[:2]
    signs = np.sign(top[np.arange(2), np.abs(top).argmax(axis=1)])
    variance = sizes**2
    return centred @ (top * signs[:, None]).T, variance[:2] / (variance.sum() or 1.0)


def _positions(source: PlotSource, kind: str) -> Floats:
    _check(source, kind)
    assert source.positions is not None
    return source.positions(0, min(MAX_POSITIONS, source.max_len or MAX_POSITIONS))


def _check(source: PlotSource, kind: str) -> None:
    """Raise Invalid if the source lacks the part that `kind` shows."""
    if KINDS[kind].has(source):
        return
    possible = [name for name, other in KINDS.items() if other.has(source)]
    allowed = ", ".join(possible) or "another model"
    message = f"{source.name} has no {KINDS[kind].needs}; expected {allowed}"
    raise Invalid("kind", kind, allowed, message=message)


def _begin(title: str, height: float = 4.8) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
