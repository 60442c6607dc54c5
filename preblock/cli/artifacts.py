"""Commands on existing artifacts: `list`, `inspect`, `check` and `remove`."""

import json
from pathlib import Path
from typing import Any

import click

from preblock.cli.options import (
    MODEL,
    PROVIDER,
    REFERENCE_ROOTS,
    REPOSITORY,
    FoundArtifact,
    describe_limits,
    find_artifact,
    find_versions,
    read_settings,
    require,
    table,
)
from preblock.extras import EXTRAS
from preblock.service.core.errors import ArtifactError, PreblockError

ENGINES = ("transformers", "vllm", "sglang", "llama.cpp", "onnxruntime-genai", "openvino-genai")
"""Consumers of `inputs_embeds` in the manifest."""


@click.command("list")
@REPOSITORY
def list_models(repository: Path | None) -> None:
    """List the models of the repository.

    One line for each version: name, version, family, size on disk, and how exactly it matches its reference. A
    damaged artifact is listed with its error.

    \b
    Example:
      preblock list --repository model_repository
    """
    from preblock.service.artifacts.catalog import find_artifacts

    found = find_artifacts(read_settings(repository=repository).repository)
    rows = [("NAME", "VERSION", "FAMILY", "SIZE", "PARITY")]
    rows += [(name, str(version), *_summarize(folder)) for name, version, folder in found]
    click.echo(table(rows))


@click.command()
@MODEL
@REPOSITORY
@click.option("--json", "as_json", is_flag=True, help="Print the manifest and the parity report as JSON.")
@click.option("--for", "engine", type=click.Choice(ENGINES), help="Print the output to request for this consumer.")
def inspect(model: str, repository: Path | None, as_json: bool, engine: str | None) -> None:
    """Show limits, outputs, weights, parity and files of a model.

    Without a version, it shows the highest.

    \b
    Examples:
      preblock inspect minilm
      preblock inspect minilm@2 --json
      preblock inspect gemma --for vllm
    """
    if engine and as_json:
        raise click.UsageError("--for and --json exclude each other")
    from preblock.cli.consumer import write_consumer
    from preblock.cli.page import write_page
    from preblock.service.artifacts.io import read, read_with_identity
    from preblock.service.artifacts.names import MANIFEST, PARITY
    from preblock.service.artifacts.onnx_check import check_graphs
    from preblock.service.artifacts.parity import ParityReport

    artifact = find_artifact(repository, model)
    manifest, identity = read_with_identity(artifact.folder)
    report = read(ParityReport, artifact.folder / PARITY)
    check_graphs(artifact.folder, manifest)
    if engine:
        click.echo(write_consumer(manifest, engine))
        return
    if not as_json:
        try:
            page = write_page(artifact, manifest, identity, report)
        except KeyError as error:
            found = ", ".join(tensor.name for graph in manifest.graphs.values() for tensor in graph.outputs)
            raise ArtifactError(f"{MANIFEST} graphs", found or "no output", f"also {error.args[0]}") from error
        click.echo(page)
        return
    documents = {"manifest": manifest.model_dump(mode="json"), "parity": report.model_dump(mode="json")}
    stated = {"name": artifact.name, "version": artifact.version, "identity": identity}
    click.echo(json.dumps(stated | documents, indent=2))


@click.command()
@REPOSITORY
@REFERENCE_ROOTS
@PROVIDER
def check(**options: Any) -> None:
    """Load each model, run it once, and exit.

    \b
    Example:
      preblock check --provider cpu
    """
    require(*EXTRAS["check"])
    from preblock.service.app import create_engine
    from preblock.service.artifacts.catalog import find_artifacts
    from preblock.service.core.auth import SERVICE

    settings = read_settings(**options)
    find_artifacts(settings.repository)  # a server starts without a model; a check of nothing fails
    models = create_engine(settings).repository.all(SERVICE)
    for model in models:
        click.echo(f"{model.name} {model.version}: runs on {model.provider}, {describe_limits(model.manifest)}")


@click.command()
@MODEL
@REPOSITORY
@click.option("--yes", is_flag=True, help="Remove without asking.")
def remove(model: str, repository: Path | None, yes: bool) -> None:
    """Remove a version of a model, or all its versions.

    Without a version, every version is removed. A running server keeps an open version until it reloads.

    \b
    Examples:
      preblock remove minilm@1
      preblock remove minilm --yes
    """
    from preblock.export.progress import format_bytes
    from preblock.export.withdrawal import check_removable, withdraw

    artifacts = find_versions(repository, model)
    for artifact in artifacts:
        check_removable(artifact.folder)
    if not yes:
        for artifact in artifacts:
            click.echo(f"{artifact.folder}: {format_bytes(_size(artifact.folder))}")
        _confirm(f"Remove {_name(artifacts)}?")
    withdraw([artifact.folder for artifact in artifacts])
    for artifact in artifacts:
        click.echo(f"removed {artifact.name} version {artifact.version}")


def _confirm(question: str) -> None:
    """Ask a question; fail without a yes, and where nobody can answer."""
    try:
        confirmed = click.confirm(question)
    except click.Abort:
        confirmed = False
        click.echo()  # ends the line of the question
    if not confirmed:
        raise click.ClickException("nothing was removed; --yes removes without asking")


def _name(artifacts: list[FoundArtifact]) -> str:
    versions = ", ".join(str(artifact.version) for artifact in artifacts)
    return f"{artifacts[0].name} {'version' if len(artifacts) == 1 else 'versions'} {versions}"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _summarize(folder: Path) -> tuple[str, str, str]:
    """Return family, size and parity of the artifact in `folder`; of a damaged one its error."""
    from preblock.export.progress import format_bytes
    from preblock.service.artifacts.io import read, read_manifest
    from preblock.service.artifacts.names import PARITY
    from preblock.service.artifacts.parity import ParityReport

    size = "-"
    try:
        size = format_bytes(_size(folder))
        manifest, report = read_manifest(folder), read(ParityReport, folder / PARITY)
    except PreblockError as error:
        return "damaged", size, str(error)
    except OSError as error:
        return "unreadable", size, str(error.strerror).lower()
    family = manifest.family + (" (random weights)" if manifest.source.has_random_weights else "")
    outputs = [output for parity in report.providers.values() for output in parity.outputs.values()]
    if not outputs:
        return family, size, "not proven"
    worst = max(outputs, key=lambda output: output.max_abs)
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in report.providers)
    return family, size, f"{worst.difference} on {providers}"
