"""Commands to make and prove artifacts: `export`, `verify` and `triton`."""

import signal
import sys
from pathlib import Path
from typing import Any, Literal

import click

from preblock.cli.options import REPOSITORY, describe_storage, find_newest, read_settings, require
from preblock.cli.progress import ProgressLine


@click.command()
@click.argument("source")
@click.option("--name", required=True, help="Name of the model in the repository.")
@REPOSITORY
@click.option(
    "--side",
    type=click.Choice(["encoder", "decoder", "text", "vision"]),
    help="Front-end to export from a model with two, such as an encoder-decoder, or one of texts and images.",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "source"]),
    default="float32",
    help="Type to round every step to: float32, or the type of the source's weights.",
)
@click.option("--segments", is_flag=True, help="Add a segment input whose ids index the token table, as in GPT-2.")
@click.option(
    "--rotary-length",
    type=click.IntRange(1),
    help="Length of the whole sequence, for rotary angles scaled by it (dynamic, longrope).",
)
@click.option("--tokens-only", is_flag=True, help="Export the token table alone: the model's own lookup.")
@click.option("--max-len", type=click.IntRange(1), help="Limit of offset + tokens; default the source's.")
@click.option(
    "--resize",
    type=click.Choice(["truncate", "interpolate", "interpolate_positions", "hybrid"]),
    help="With --max-len: method to resize a learned position table.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]),
    default="float32",
    help="Stored type of the tables; vectors are always computed in float32.",
)
@click.option(
    "--scale",
    type=click.Choice(["row", "tensor"]),
    help="With --dtype int8: one scale for each row, or one for the table; default row.",
)
def export(source: str, name: str, repository: Path | None, resize: str | None, **options: Any) -> None:
    """Export the front-end of SOURCE as the next version of a model, and prove it equal to the PyTorch module.

    SOURCE is an existing folder with config.json and safetensors files, the name of a preset, or
    hf:owner/name[@revision].
    """
    require("torch", "export")
    require("onnxruntime", "cpu")
    from preblock.export.exporter import export as run

    # An exception, unlike the default action of SIGTERM, lets the export remove its draft.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ProgressLine(name) as progress:
        folder = read_settings(repository=repository).repository
        exported = run(source, name, folder, progress, **options, resizing=resize)
    for provider, parity in exported.parity.providers.items():
        click.echo(f"{exported.folder}: {parity.summary()} ({provider})")
    if exported.parity.discovery:
        library = exported.manifest.source.discovered_with
        click.echo(f"{exported.folder}: discovered with {library}: {exported.parity.discovery.summary()}")
    if exported.parity.storage:
        click.echo(f"{exported.folder}: {describe_storage(exported.manifest, exported.parity)}")


@click.command()
@click.argument("name")
@REPOSITORY
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="Device to prove the model on; default: the CPU, and CUDA if it works.",
)
def verify(name: str, repository: Path | None, provider: Literal["cpu", "cuda"] | None) -> None:
    """Check the hashes of the model NAME, and prove it equal to its PyTorch module again.

    The results replace those in the parity report.
    """
    require("torch", "export")
    require("onnxruntime", "cpu")
    from preblock.export.verification import verify as run

    folder = find_newest(repository, name)
    with ProgressLine(name) as progress:
        report = run(folder, progress, provider)
    for proven_on, parity in report.providers.items():
        click.echo(f"{folder}: hashes agree, {parity.summary()} ({proven_on})")
    if report.storage:
        click.echo(f"{folder}: {report.storage_summary()}, as the export found: the tables in float32 are not in it")


@click.command()
@click.argument("name")
@REPOSITORY
def triton(name: str, repository: Path | None) -> None:
    """Write config.pbtxt for the model NAME, so that NVIDIA Triton can serve the repository."""
    from preblock.export.triton import write_config

    folder = find_newest(repository, name)
    click.echo(write_config(folder.parent))
