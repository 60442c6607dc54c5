"""Commands to make and prove artifacts: `export` and `verify`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click
from click.shell_completion import CompletionItem

from preblock.cli.options import (
    REFERENCE_ROOTS,
    REPOSITORY,
    FoundArtifact,
    complete_model,
    describe_limits,
    describe_storage,
    exit_on_sigterm,
    find_artifact,
    read_settings,
    repository_option,
    require,
)
from preblock.cli.progress import ProgressLine
from preblock.extras import EXTRAS

if TYPE_CHECKING:
    from preblock.export.options import ResolvedSource

UNREPEATABLE = 3
"""Exit code of `verify` for an artifact that is neither proven again nor wrong."""


def complete_source(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a preset or a folder."""
    from preblock.models.presets import PRESETS

    presets = [CompletionItem(name) for name in PRESETS if name.startswith(incomplete)]
    return [*presets, CompletionItem(incomplete, type="dir")]


@click.command()
@click.argument("source", shell_complete=complete_source)
@click.option("--name", help="Name of the model in the repository; default: the name of SOURCE.")
@REPOSITORY
@click.option(
    "--side",
    type=click.Choice(["encoder", "decoder", "text", "vision"]),
    help="Front-end to export from a model with two: an encoder-decoder, or a model of texts and images.",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "source"]),
    default="float32",
    help="Type to round each step to: float32, or the type of the weights.",
)
@click.option("--segments", is_flag=True, help="Add a segment input whose ids index the token table, as in GPT-2.")
@click.option(
    "--rotary-length",
    type=click.IntRange(1),
    help="Length of the whole sequence, where rotary angles depend on it (dynamic, longrope).",
)
@click.option(
    "--rotary-layout",
    type=click.Choice(["full", "half", "fused"]),
    default="full",
    help="Columns of the rotary outputs: each value twice, once, or cosines and sines in one output.",
)
@click.option(
    "--rotary-dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    help="Type of the rotary outputs in the graph: float16 rounds the float32 values once.",
)
@click.option(
    "--soft-prompt",
    "soft_prompts",
    multiple=True,
    metavar="NAME=FOLDER",
    help="A soft prompt of PEFT: its name and its folder; may be repeated.",
)
@click.option("--reference", is_flag=True, help="Leave n-gram tables in the safetensors files of SOURCE.")
@click.option("--tokens-only", is_flag=True, help="Export the bare token lookup, without positions and norm.")
@click.option(
    "--tokenizer",
    type=click.Choice(["ignore-conflicts"]),
    help="Keep the ids of tokenizer.json where transformers has others for ordinary text; default: fail.",
)
@click.option("--max-len", type=click.IntRange(1), help="Most tokens of a sequence; default: the limit of SOURCE.")
@click.option(
    "--resize",
    "resizing",
    type=click.Choice(["truncate", "interpolate", "interpolate_positions", "hybrid"]),
    help="With --max-len: how to resize a learned position table.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]),
    default="float32",
    help="Type to store the tables in; vectors are computed in float32.",
)
@click.option(
    "--scale",
    type=click.Choice(["row", "tensor"]),
    help="With --dtype int8: a scale for each row, or one for the table; default row.",
)
def export(source: str, name: str | None, repository: Path | None, **options: Any) -> None:
    """Export a front-end as the next version of a model.

    The export is compared with its source before it is published. SOURCE is a folder with safetensors files and
    config.json or frontend.toml, a preset (random weights), or hf:owner/name[@revision] on the Hugging Face hub.
    `preblock families` lists the presets and the model types.

    \b
    Examples:
      preblock export gpt2-small
      preblock export ./my-bert --name minilm --dtype int8
      preblock export hf:openai-community/gpt2 --repository /srv/models
    """
    require(*EXTRAS["export"])
    settings = read_settings(repository=repository)
    resolved = resolve_source(source, name, settings.repository, **options)
    from preblock.export.exporter import export_source

    exit_on_sigterm()
    with ProgressLine(resolved.name) as progress:
        exported = export_source(resolved, settings.repository, progress)
    print_warnings(resolved.name, exported.warnings)
    _summarize(exported, resolved.name, settings)


def resolve_source(source: str, name: str | None, repository: Path, **options: Any) -> "ResolvedSource":
    """Check the arguments before weights are read, and return the source as `resolve` does; raise UsageError."""
    from preblock.export.errors import ExportError
    from preblock.export.options import resolve

    try:
        return resolve(source, name, repository=repository, **options)
    except ExportError as error:
        raise click.UsageError(str(error)) from error


def print_warnings(name: str, warnings: Sequence[str]) -> None:
    """Print the warnings of an export on standard error."""
    for warning in warnings:
        click.echo(f"{name}: warning: {warning}", err=True)


def _summarize(exported: Any, name: str, settings: Any) -> None:
    """Print the made artifact, and the command to serve it."""
    from preblock.export.progress import format_bytes

    manifest = exported.manifest
    size = format_bytes(sum(file.bytes for file in manifest.files.values()))
    click.echo(f"exported {name} version {exported.folder.name}: {exported.folder}")
    click.echo(f"  {describe_limits(manifest)}, {size}")
    for provider, parity in exported.parity.providers.items():
        click.echo(f"  {parity.summary()} ({provider})")
    if exported.parity.discovery:
        click.echo(f"  discovered with {manifest.source.discovered_with}: {exported.parity.discovery.summary()}")
    if exported.parity.storage:
        click.echo(f"  {describe_storage(manifest, exported.parity)}")
    references = manifest.references if manifest.kind == "tokens" else {}
    folders = ",".join(dict.fromkeys(str(Path(file).parent) for file in references))
    if references:
        left = format_bytes(sum(reference.bytes for reference in references.values()))
        click.echo(f"  refers to {len(references)} files of {left}, which must stay in place")
    option = f" --reference-roots {quote(folders)}" if references else ""
    click.echo(f"Serve it:\n  preblock serve{repository_option(settings)}{option}")


@click.command()
@click.argument("model", metavar="[NAME[@VERSION]]", required=False, shell_complete=complete_model)
@click.option("--all", "every", is_flag=True, help="Verify every version of every model, also after a failure.")
@REPOSITORY
@REFERENCE_ROOTS
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="Device to prove the model on; default: the CPU, and CUDA if it works.",
)
def verify(
    model: str | None,
    every: bool,
    repository: Path | None,
    reference_roots: str | None,
    provider: Literal["cpu", "cuda"] | None,
) -> None:
    """Check the hashes of a model, and prove it again.

    The artifact is compared with its PyTorch module, or with NumPy where PyTorch is not installed. The results go into
    the parity report. Without a version, the highest is verified. An artifact does not hold your own module, so only
    its hashes are checked; the exit code is then 3, or 0 with --all.

    \b
    Examples:
      preblock verify minilm
      preblock verify minilm@2 --provider cpu
      preblock verify --all
    """
    if every == (model is not None):
        raise click.UsageError(f"NAME and --all: got {'both' if every else 'neither'}, expected one of them")
    require(*EXTRAS["verify"])
    settings = read_settings(repository=repository, reference_roots=reference_roots)
    from preblock.export.errors import ExportError, UnrepeatableError
    from preblock.service.artifacts.catalog import find_artifacts

    exit_on_sigterm()
    if model is not None:
        try:
            _verify(find_artifact(settings.repository, model), settings.reference_folders, provider)
        except UnrepeatableError as error:
            click.echo(error)
            sys.exit(UNREPEATABLE)
        return
    failed = False
    for artifact in map(FoundArtifact._make, find_artifacts(settings.repository)):
        try:
            _verify(artifact, settings.reference_folders, provider)
        except UnrepeatableError as error:
            click.echo(error)
        except (ExportError, OSError) as error:
            click.echo(f"preblock: {artifact.name}@{artifact.version}: {error}", err=True)
            failed = True
    sys.exit(failed)


def _verify(artifact: FoundArtifact, reference_roots: Sequence[Path], provider: Literal["cpu", "cuda"] | None) -> None:
    """Verify an artifact, and print the results."""
    from preblock.export.verification import verify as run

    folder = artifact.folder
    with ProgressLine(artifact.name) as progress:
        report = run(folder, progress, provider, reference_roots)
    for proven_on, parity in report.providers.items():
        click.echo(f"{folder}: hashes agree, {parity.summary()} ({proven_on})")
    if report.references:
        click.echo(f"{folder}: {len(report.references)} referenced files hashed")
    if report.storage:
        click.echo(f"{folder}: {report.storage_summary()}, as the export found: the tables in float32 are not in it")
