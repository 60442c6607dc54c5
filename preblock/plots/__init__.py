"""Pictures of front-ends, as matplotlib figures. The extra `plot` installs matplotlib.

Read a model once, then draw its parts:

    from preblock import plots

    source = plots.read_artifact("model_repository/minilm/1")
    figure = plots.heatmap(source)
    plots.save(figure, "positions.svg")
"""

from preblock.plots.figures import bias, heatmap, parameters, pca, similarity, wavelengths
from preblock.plots.files import save
from preblock.plots.module import read_module, read_preset
from preblock.plots.source import PlotSource, read_artifact

__all__ = [
    "PlotSource",
    "bias",
    "heatmap",
    "parameters",
    "pca",
    "read_artifact",
    "read_module",
    "read_preset",
    "save",
    "similarity",
    "wavelengths",
]
