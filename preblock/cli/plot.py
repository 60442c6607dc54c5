"""The command that draws pictures: `plot`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from preblock.cli.options import (
    MODEL,
    REFERENCE_ROOTS,
    REPOSITORY,
    find_artifact,
    read_settings,
    require,
    split_version,
)
from preblock.extras import EXTRAS
from preblock.service.core.errors import ArtifactError, Invalid, NotFound

if TYPE_CHECKING:
    from preblock.plots import PlotSource

KINDS = ("heatmap", "similarity", "pca", "wavelengths", "bias", "parameters")


@click.command()
@MODEL
@click.argument("kind", metavar="KIND", type=click.Choice(KINDS))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, .svg or .png.",
)
@REPOSITORY
@REFERENCE_ROOTS
def plot(model: str, kind: str, output: Path, repository: Path | None, reference_roots: str | None) -> None:
    """Draw positions, tokens, frequencies, biases or parameters.

    The model is an artifact of the repository, or else a preset (random weights). The same input gives the same bytes.

    \b
    Kinds:
      heatmap      position vectors, position by dimension
      similarity   cosine similarity of positions
      pca          token vectors along two principal components
      wavelengths  sinusoids and rotary frequencies
      bias         ALiBi and T5 biases of attention, query by key
      parameters   share of each table

    \b
    Examples:
      preblock plot minilm heatmap -o positions.svg
      preblock plot gpt2-small@1 parameters -o share.png
    """
    require(*EXTRAS["plot"])
    from preblock.plots.figures import KINDS as FIGURES
    from preblock.plots.files import check_place, save

    try:
        check_place(output)
    except Invalid as error:
        raise click.UsageError(f"--output: got {error.got}, expected {error.expected}") from error
    figure = FIGURES[kind].draw(_read(repository, model, reference_roots))
    try:
        save(figure, output)
    except OSError as error:
        raise click.ClickException(f"{output}: {str(error.strerror).lower()}") from error
    click.echo(f"wrote {output}")


def _read(repository: Path | None, model: str, reference_roots: str | None) -> "PlotSource":
    """Return the numbers of an artifact, or of a preset where the repository has no such model."""
    from preblock.models.presets import PRESETS
    from preblock.plots import read_artifact, read_preset

    split_version(model)
    try:
        artifact = find_artifact(repository, model)
    except (ArtifactError, NotFound):
        if model not in PRESETS:
            raise
        require("torch")
        return read_preset(model)
    return read_artifact(artifact.folder, read_settings(reference_roots=reference_roots).reference_folders)
