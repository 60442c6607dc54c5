"""Compare learned and sinusoidal positions: values, parameters, and the cosine of positions by their distance.

    .venv/bin/python examples/compare_positions.py --model minilm -o comparison.svg

The learned positions are those of an artifact, such as the trained table of `minilm`. The sinusoids have its width.
"""

import argparse
from pathlib import Path

try:
    import numpy as np
    from matplotlib.figure import Figure

    from preblock.failures import fails_in_one_line
    from preblock.models import SinusoidalPositionalEncoding
    from preblock.plots import PlotSource, read_artifact, read_module
    from preblock.plots.figures import cosine_similarity
    from preblock.plots.files import check_place, save
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. After `make serve`: .venv/bin/python -m pip install matplotlib torch, "
        "and run it with .venv/bin/python; elsewhere: pip install 'preblock[cpu,torch,plot]'"
    ) from None

COUNT = 128
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
MAX_SHOWN = 2.0
"""Largest value of a colour, in root mean squares of the rows: larger ones have the same colour."""


def rows_of(source: PlotSource) -> "np.typing.NDArray[np.float32]":
    """Return the first positions of a source, (L, D)."""
    if source.positions is None:
        raise SystemExit(f"--model: {source.name} adds no position vectors.")
    return source.positions(0, min(COUNT, source.max_len or COUNT))


def mean_cosines(source: PlotSource) -> dict[int, float]:
    """Return the mean cosine of two positions, by their distance."""
    cosines = cosine_similarity(rows_of(source))
    return {distance: float(np.diag(cosines, distance).mean()) for distance in DISTANCES if distance < len(cosines)}


def draw(sources: list[PlotSource]) -> Figure:
    """Draw the values and the cosines of each source."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    for line, source in zip(figure.subplots(len(sources), 2), sources, strict=True):
        rows = rows_of(source)
        most = MAX_SHOWN * float(np.sqrt(np.square(rows).mean()))
        values = line[0].imshow(rows, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
        line[0].set(title=source.name, xlabel="dimension", ylabel="position")
        cosines = line[1].imshow(cosine_similarity(rows), cmap="viridis", vmax=1.0, interpolation="nearest")
        line[1].set(title="cosine", xlabel="position", ylabel="position")
        figure.colorbar(values, ax=line[0])
        figure.colorbar(cosines, ax=line[1])
    return figure


@fails_in_one_line
def main(arguments: list[str] | None = None) -> None:
    """Print the numbers, and draw them."""
    parser = argparse.ArgumentParser(description="Compare learned and sinusoidal positions.")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="folder of artifacts")
    parser.add_argument("--model", default="minilm", help="a model with learned positions (%(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="picture to write, .svg or .png")
    given = parser.parse_args(arguments)
    if given.output is not None:
        check_place(given.output)
    versions = [int(path.name) for path in (given.repository / given.model).glob("[1-9]*")]
    if not versions:
        raise SystemExit(f"--model: {given.repository} has no model {given.model}.")
    learned = read_artifact(given.repository / given.model / str(max(versions)))
    length, width = rows_of(learned).shape
    sinusoids = read_module(SinusoidalPositionalEncoding(width, length), "sinusoids")
    print("distance  ", *(f"{distance:>6}" for distance in DISTANCES))
    for source in (learned, sinusoids):
        print(f"{source.name:<10}", *(f"{value:>6.3f}" for value in mean_cosines(source).values()))
    if given.output is not None:
        save(draw([learned, sinusoids]), given.output)
        print(f"wrote {given.output}")


if __name__ == "__main__":
    main()
