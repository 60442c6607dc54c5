"""The command `convert`: an artifact in the files of another engine."""

from pathlib import Path

import click

from preblock.cli.options import MODEL, REPOSITORY, exit_on_sigterm, find_artifact, require
from preblock.extras import EXTRAS

IN_REPOSITORY = "triton"
"""The layout that stays in the repository, beside the versions of the model."""


@click.command()
@MODEL
@REPOSITORY
@click.option(
    "--layout",
    type=click.Choice(["transformers.js", "ort-genai", "openvino", "edgellm", IN_REPOSITORY]),
    required=True,
    help="Engine that reads the files.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder to write; {IN_REPOSITORY} writes beside the versions of the model.",
)
@click.option(
    "--image-token-id",
    type=click.IntRange(0),
    help="With ort-genai: id of the tokens to replace with image features.",
)
def convert(model: str, repository: Path | None, layout: str, output: Path | None, image_token_id: int | None) -> None:
    """Write the token lookup of a model as files of another engine.

    The engine then looks tokens up by itself, beside its own copy of the blocks. Existing files are not replaced.
    Without a version, the highest is converted.

    \b
    Examples:
      preblock convert gpt2-small --layout transformers.js --output ./gpt2-web
      preblock convert minilm --layout triton --repository model_repository
    """
    if (output is None) != (layout == IN_REPOSITORY):
        expected = "nothing, as the file belongs beside the versions of the model" if output else "a folder"
        raise click.UsageError(f"--output: got {output or 'nothing'} with {layout}, expected {expected}")
    if image_token_id is not None and layout != "ort-genai":
        raise click.UsageError(f"--image-token-id: got {image_token_id} with {layout}, expected the layout ort-genai")
    if layout == IN_REPOSITORY:
        from preblock.export.layouts.triton import write_config

        artifact = find_artifact(repository, model)
        click.echo(write_config(artifact.folder.parent, artifact.version))
        return
    assert output is not None
    require(*EXTRAS["convert"])
    from preblock.export.layouts.conversion import convert as run

    artifact = find_artifact(repository, model)
    exit_on_sigterm()
    for file in run(artifact.folder, layout, output, image_token_id):
        click.echo(file)
