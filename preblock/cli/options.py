"""Options, settings, checks and descriptions shared by several commands."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from preblock.service.core.errors import PreblockError

REPOSITORY = click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the models; default PREBLOCK_REPOSITORY, or model_repository.",
)
PROVIDER = click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device to run models on; default auto: CUDA if it works, else the CPU.",
)


def read_settings(**options: Any) -> Any:
    """Return the settings, with `options` over variables, file and defaults. An option of None counts as missing."""
    from preblock.service.core.settings import Settings

    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except PreblockError as error:
        if error.field.startswith("--"):
            raise click.UsageError(str(error)) from error
        raise


def require(module: str, extra: str) -> None:
    """Fail if `module` is not installed; the error holds the command to install it."""
    if find_spec(module) is None:
        raise click.ClickException(f"this command needs {module}: pip install 'preblock[{extra}]'")


def find_newest(repository: Path | None, name: str) -> Path:
    """Return the folder of the highest version of the model `name`.

    Args:
        repository: value of --repository.
        name: name of the model.

    """
    from preblock.service.artifacts.catalog import find_artifacts
    from preblock.service.core.errors import NotFound

    artifacts = find_artifacts(read_settings(repository=repository).repository)
    folders = [folder for found, _, folder in artifacts if found == name]
    if not folders:
        raise NotFound("NAME", name, ", ".join(dict.fromkeys(found for found, _, _ in artifacts)))
    return folders[-1]


def describe_limits(manifest: Any) -> str:
    """Return the family, the legal inputs and the width of a model in one line."""
    if manifest.kind == "stem":
        return f"{manifest.family}, {manifest.input.name} {list(manifest.input.shape)}, width {manifest.width}"
    indices = "".join(f", {name} 0 to {count - 1}" for name, count in manifest.indices.items())
    return (
        f"{manifest.family}, ids 0 to {manifest.vocab_size - 1}{indices}, "
        f"max_len {manifest.max_len or 'unlimited'}, width {manifest.width}"
    )


def describe_storage(manifest: Any, report: Any) -> str:
    """Return the stored type of the tables and its error in one line."""
    return f"stored as {manifest.stored_as}: {report.storage_summary()}"
