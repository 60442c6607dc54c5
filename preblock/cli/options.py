"""Options, settings, checks and completions shared by several commands."""

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import click

from preblock.extras import find_missing, write_hint
from preblock.service.core.errors import NotFound, PreblockError

SPELLINGS: Mapping[str, str] = {
    "repository": "--model-repository",
    "model_control": "--model-control-mode",
    "aliases": "--served-model-name",
}
"""Options of Triton, the last one of vLLM, as second spellings, by setting."""
REPOSITORY = click.option(
    "--repository",
    SPELLINGS["repository"],
    "repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the models; default PREBLOCK_REPOSITORY, or model_repository.",
)
REFERENCE_ROOTS = click.option(
    "--reference-roots",
    metavar="TEXT",
    help="Comma-separated folders of tables outside artifacts; default PREBLOCK_REFERENCE_ROOTS, or none.",
)
PROVIDER = click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Device to run models on; default auto: CUDA, if it works, for models with a matrix product.",
)


class FoundArtifact(NamedTuple):
    """An artifact of the repository: name and version of the model, and its folder."""

    name: str
    version: int
    folder: Path


def complete_model(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a model of the repository; after an @, its version."""
    from preblock.service.artifacts.catalog import find_artifacts

    with suppress(Exception):  # a shell shows no errors
        found = find_artifacts(read_settings(repository=context.params.get("repository")).repository)
        texts = [f"{name}@{version}" if "@" in incomplete else name for name, version, _ in found]
        return [text for text in dict.fromkeys(texts) if text.startswith(incomplete)]
    return []


MODEL = click.argument("model", metavar="NAME[@VERSION]", shell_complete=complete_model)


def read_settings(**options: Any) -> Any:
    """Return the settings, with `options` over variables, file and defaults. An option of None counts as missing."""
    from preblock.service.core.settings import Settings

    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except PreblockError as error:
        if error.field.startswith("--"):
            raise click.UsageError(str(error)) from error
        raise


def require(*extras: str) -> None:
    """Fail if one of `extras` is not installed; the error holds the command to install all missing ones."""
    if missing := find_missing(extras):
        raise click.ClickException(f"this command needs {' and '.join(missing.values())}: {write_hint(missing)}")


def exit_on_sigterm() -> None:
    """Exit at SIGTERM by an exception, so that drafts are removed; its default action would leave them."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def split_version(model: str) -> tuple[str, int | None]:
    """Return name and version of NAME or NAME@VERSION; None without a version.

    Raises:
        UsageError: the version is not a whole number from 1 on.

    """
    from preblock.service.artifacts.catalog import VERSION

    name, at, version = model.partition("@")
    if not at:
        return name, None
    if not VERSION.fullmatch(version):
        raise click.UsageError(f"{model}: the version after the @ is {version!r}, not a whole number from 1 on")
    return name, int(version)


def find_versions(repository: Path | None, model: str) -> list[FoundArtifact]:
    """Return the artifacts of NAME[@VERSION] by version: all of the model without a version.

    Args:
        repository: value of --repository.
        model: NAME or NAME@VERSION.

    Raises:
        NotFound: the repository has no such model or version.

    """
    from preblock.service.artifacts.catalog import find_artifacts

    name, version = split_version(model)
    root = read_settings(repository=repository).repository
    artifacts = [FoundArtifact(*found) for found in find_artifacts(root)]
    versions = [artifact for artifact in artifacts if artifact.name == name]
    if not versions:
        names = list(dict.fromkeys(artifact.name for artifact in artifacts))
        close = get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
        message = f"the repository {root} has no model {name!r}; {hint}"
        raise NotFound("NAME", name, ", ".join(names), message=message)
    found = [artifact for artifact in versions if version in (None, artifact.version)]
    if not found:
        known = ", ".join(str(artifact.version) for artifact in versions)
        raise NotFound("VERSION", version, known, message=f"{name} has no version {version}; it has {known}")
    return found


def find_artifact(repository: Path | None, model: str) -> FoundArtifact:
    """Return the artifact of NAME[@VERSION]: the highest version without a version; raise as `find_versions` does."""
    return find_versions(repository, model)[-1]


def describe_limits(manifest: Any) -> str:
    """Return the family, the legal inputs and the width of a model in one line, and whether its weights are random."""
    weights = ", random weights" if manifest.source.has_random_weights else ""
    if manifest.kind == "stem":
        return f"{manifest.family}, {manifest.input.name} {list(manifest.input.shape)}, width {manifest.width}{weights}"
    indices = "".join(f", {name} 0 to {count - 1}" for name, count in manifest.indices.items())
    return (
        f"{manifest.family}, ids 0 to {manifest.vocab_size - 1}{indices}, "
        f"max_len {manifest.max_len or 'unlimited'}, width {manifest.width}{weights}"
    )


def describe_storage(manifest: Any, report: Any) -> str:
    """Return the stored type of the tables and its error in one line."""
    return f"stored as {manifest.stored_as}: {report.storage_summary()}"


def repository_option(settings: Any) -> str:
    """Return the option that lets a further command use the same repository; empty if it needs none."""
    given = settings.origins["repository"] == "--repository"
    return f" --repository {shlex.quote(str(settings.repository))}" if given else ""


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows in columns, aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
