"""The command line. Wrong use exits with 2 and failure with 1, each with one line; `--debug` shows the traceback.

What a command needs is imported when it runs: `serve` must not pay for torch, nor need it.
"""

import json
import math
import os
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from preblock import __version__
from preblock.service.core.errors import PreblockError

REPOSITORY = click.option(
    "--repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the artifacts; default model_repository, or PREBLOCK_REPOSITORY.",
)
PAUSE = 10.0
"""Seconds between two lines on the same step, where they stay."""
PROVIDER = click.option(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where models run; default auto: CUDA where it works, the CPU elsewhere.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
@click.version_option(__version__)
def app(debug: bool) -> None:
    """Token ids in, the vectors that enter block 0 out."""


@app.command()
@click.argument("source")
@click.option("--name", required=True, help="Name of the model in the repository.")
@REPOSITORY
@click.option(
    "--side",
    type=click.Choice(["encoder", "decoder", "text", "vision"]),
    help="Which front-end of a model that has two: an encoder-decoder, or one of texts and images.",
)
@click.option(
    "--arithmetic",
    type=click.Choice(["float32", "source"]),
    default="float32",
    help="Rounding of every step: that of float32, or that of the type in the file.",
)
@click.option("--segments", is_flag=True, help="Take segments that are ids of the token table, such as GPT-2's.")
@click.option(
    "--rotary-length",
    type=click.IntRange(1),
    help="Tokens of the whole sequence, for rotary angles that depend on it (dynamic, longrope).",
)
@click.option("--max-len", type=click.IntRange(1), help="Another limit than the source's.")
@click.option(
    "--resize",
    type=click.Choice(["truncate", "interpolate", "interpolate_positions", "hybrid"]),
    help="With --max-len: how a learned table of positions is made to fit.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "int4"]),
    default="float32",
    help="Type that the tables are stored in; vectors are computed in float32 whatever it is.",
)
@click.option(
    "--scale",
    type=click.Choice(["row", "tensor"]),
    help="With --dtype int8: what has a scale of its own; default row.",
)
def export(source: str, name: str, repository: Path | None, resize: str | None, **options: Any) -> None:
    """Export the front-end of SOURCE as the next version of a model, and prove it equal.

    SOURCE is an existing folder with config.json and safetensors files, the name of a preset, or
    hf:owner/name[@revision].
    """
    _require("torch", "export")
    _require("onnxruntime", "cpu")
    from preblock.export.exporter import export as run

    # What is half-written goes away before the process does.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _Progress(name) as progress:
        exported = run(source, name, _settings(repository=repository).repository, progress, **options, resizing=resize)
    for provider, parity in exported.parity.providers.items():
        click.echo(f"{exported.folder}: {parity.summary()} ({provider})")
    if exported.parity.storage:
        click.echo(f"{exported.folder}: {_storage(exported.manifest, exported.parity)}")


@app.command()
@click.argument("name")
@REPOSITORY
@click.option(
    "--provider",
    type=click.Choice(["cpu", "cuda"]),
    help="Where to prove it; default: on the CPU, and on CUDA where it works.",
)
def verify(name: str, repository: Path | None, provider: Literal["cpu", "cuda"] | None) -> None:
    """Check the hashes of the model NAME, and prove it equal to its PyTorch module once more.

    What is found takes its place in the parity report.
    """
    _require("torch", "export")
    _require("onnxruntime", "cpu")
    from preblock.export.exporter import verify as run

    folder = _newest(_settings(repository=repository).repository, name)
    with _Progress(name) as progress:
        report = run(folder, progress, provider)
    for proven_on, parity in report.providers.items():
        click.echo(f"{folder}: hashes agree, {parity.summary()} ({proven_on})")
    if report.storage:
        click.echo(f"{folder}: {report.storage_summary()}, as the export found: the tables in float32 are not in it")


@app.command()
@click.argument("name")
@REPOSITORY
def inspect(name: str, repository: Path | None) -> None:
    """Show what the model NAME is and how it was proven."""
    from preblock.service.artifacts.manifest import PARITY, ParityReport, read, read_with_identity

    folder = _newest(_settings(repository=repository).repository, name)
    (manifest, identity), report = read_with_identity(folder), read(ParityReport, folder / PARITY)
    click.echo(f"{folder}: {_limits(manifest)}")
    click.echo(f"identity: {identity}")
    for provider, parity in report.providers.items():
        for output, compared in parity.outputs.items():
            click.echo(f"parity on {provider}, {output}: {compared.summary()}")
    if report.storage:
        click.echo(_storage(manifest, report))
    for table, stored in report.storage.items():
        click.echo(f"  {table}: {stored.summary()}")
    click.echo(manifest.model_dump_json(indent=2))


@app.command()
@click.argument("name")
@REPOSITORY
def triton(name: str, repository: Path | None) -> None:
    """Write config.pbtxt beside the versions of the model NAME, for NVIDIA Triton to serve the repository."""
    from preblock.export.triton import write_config

    folder = _newest(_settings(repository=repository).repository, name)
    click.echo(write_config(folder.parent))


@app.command()
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model that it may use, or a pattern; default all.")
@click.option("--admin", is_flag=True, help="Whether it may load and unload models.")
def key(name: str, models: tuple[str, ...], admin: bool) -> None:
    """Print a new key for NAME, which nothing shows again, and the entry for the file that --api-keys-file names."""
    from preblock.service.core.auth import new_key

    made, entry = new_key(name, models, admin)
    click.echo(f"{made}\n\n{entry}", nl=False)


@app.command()
@REPOSITORY
@PROVIDER
def check(**options: Any) -> None:
    """Open every model, run it once, and exit."""
    _require("onnxruntime", "cpu")
    from preblock.service.app import create_engine
    from preblock.service.core.auth import as_service

    with as_service():
        models = create_engine(_settings(**options)).repository.all()
    for model in models:
        click.echo(f"{model.name} {model.version}: runs on {model.provider}, {_limits(model.manifest)}")


class _WithSettings(click.Command):
    """A command with an option for every setting, which are imported when it runs."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from preblock.service.core.settings import Settings, option

        options: list[click.Parameter] = []
        for name, field in Settings.model_fields.items():
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            default = field.get_default(call_default_factory=True)
            told = "" if default is None else f" [default: {default}]"
            options.append(
                click.Option(
                    [option(name)], type=click.Choice(choices) if choices else str, help=f"{field.description}{told}"
                )
            )
        return [*options, *super().get_params(ctx)]


@app.command("settings", cls=_WithSettings)
def show_settings(**options: Any) -> None:
    """Print every setting, its value, and where that comes from: an option, a variable, a file, or the default."""
    found, origins = _load(**options)
    rows = [(name, "none" if value is None else str(value), origins[name]) for name, value in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command(cls=_WithSettings)
def serve(**options: Any) -> None:
    """Serve every model of the repository.

    Every option is also a variable, such as PREBLOCK_PORT, and a key of the file of --config-file, such as port.
    """
    _require("onnxruntime", "cpu")
    from preblock.service.server.supervisor import serve as run

    settings = _settings(**options)

    def announce(address: str, models: list[Any]) -> None:
        lines = [f"Preblock serves on {address} (documentation: {address}/docs)"]
        lines += [f"  {model.name}: {_limits(model.manifest)}, {model.provider}" for model in models]
        if settings.grpc_port is not None:
            lines.append(f"gRPC on {settings.host}:{settings.grpc_port}")
        # Who listens on every address is reached on this machine by its loopback one.
        local = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        takes_tokens = [model.name for model in models if model.manifest.kind == "tokens"]
        lines.append("Try:")
        lines.append(
            f"  curl {local}/models/{takes_tokens[0]}/embed -H 'Content-Type: application/json' "
            """-d '{"input_ids": [[1, 2, 3]], "encoding": "float"}'"""
            if takes_tokens
            else f"  curl {local}/v2/models/{models[0].name}"
        )
        _tell_who_reads("\n".join(lines))

    run(settings, announce)


def _tell_who_reads(text: str) -> None:
    """Print on standard output, which whoever started a service may have closed, as `head -1` does; it goes on."""
    try:
        click.echo(text)  # and nothing stays in a buffer
    except OSError:
        with Path(os.devnull).open("w") as nowhere:  # what is left would be written when Python ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Shape(click.ParamType[tuple[int, int]]):
    """Rows and tokens of each, such as 8,128."""

    name = "rows,tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = value.split(",")
        if len(sizes) != 2 or not all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes):
            self.fail(f"got {value}, allowed rows and tokens of each, such as 8,128", param, ctx)
        return int(sizes[0]), int(sizes[1])


class _Seconds(click.FloatRange):
    """A time, above 0 and with an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"got {value}, allowed a number of seconds", param, ctx)
        return seconds


@app.command()
@click.argument("url")
@click.option("--model", required=True, help="Name of the model that is asked.")
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    type=click.Choice(["npy", "v2", "json", "grpc", "steps"]),
    default=["npy"],
    help="How it is asked, default npy; may be repeated. steps are those of a decode stream.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=_Shape(),
    default=[(1, 1), (1, 128), (8, 128)],
    help="Rows and tokens of each, such as 8,128; may be repeated. Default 1,1, then 1,128, then 8,128.",
)
@click.option(
    "--connections", type=click.IntRange(1), default=4, show_default=True, help="How many ask at the same time."
)
@click.option(
    "--seconds",
    type=_Seconds(0, min_open=True),
    default=5.0,
    show_default=True,
    help="How long each protocol is asked for each shape.",
)
@click.option(
    "--timeout",
    type=_Seconds(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that connecting, and an answer, may take.",
)
@click.option("--grpc-port", type=click.IntRange(1, 65535), help="Port of gRPC, for the protocol grpc.")
@click.option("--key", help="Key that the server asks for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def bench(
    url: str,
    model: str,
    protocols: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    as_json: bool,
    grpc_port: int | None,
    key: str | None,
    timeout: float,
    **options: Any,
) -> None:
    """Ask the server at URL for vectors as fast as it answers, and print how fast that was.

    Each connection sends a request, waits for its answer, and sends the next. The exit code is 1 where a protocol
    answered no request of a shape.
    """
    if "grpc" in protocols and grpc_port is None:
        raise click.UsageError("--grpc-port: got nothing, allowed the port of the server's gRPC, for the protocol grpc")
    _require("httpx", "client")
    _require("websockets", "client")
    from preblock import connect
    from preblock.bench.load import measure
    from preblock.bench.report import table
    from preblock.bench.workload import Target
    from preblock.client.errors import PreblockError as ClientError

    results = []
    try:
        target = Target(url, model, key, grpc_port)
        with connect(url, timeout=timeout, key=key, retries=0) as client:
            asked = client.model(model)
        for protocol in protocols:
            for shape in shapes:
                with _Progress("bench", quiet=True) as progress:
                    results.append(
                        measure(
                            target,
                            asked,
                            protocol,
                            shape,
                            timeout=timeout,
                            look=progress,
                            **options,
                        )
                    )
    except (ClientError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([result.document() for result in results]))
    else:
        click.echo(table(results))
    sys.exit(not all(result.requests for result in results))


def main() -> None:
    """Run the command line, and turn every failure into one line and an exit code."""
    debug = "--debug" in sys.argv[1:2]
    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        _fail(2, error.format_message())
    except click.Abort:
        _fail(130, "interrupted")
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            _fail(end.code, "terminated")
        raise
    except Exception as error:
        if debug:
            raise
        _fail(1, _message(error))


def _message(error: Exception) -> str:
    expected = isinstance(error, PreblockError | click.ClickException) or type(error).__module__.startswith("preblock")
    text = " ".join(str(error).split())
    return text if expected else f"{type(error).__name__}: {text} (preblock --debug … shows where)"


def _fail(code: int, message: str) -> None:
    click.echo(f"preblock: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _settings(**options: Any) -> Any:
    return _load(**options).settings


def _load(**options: Any) -> Any:
    from preblock.service.core.settings import load

    try:
        return load({name: value for name, value in options.items() if value is not None})
    except PreblockError as error:
        if error.field.startswith("--"):
            raise click.UsageError(str(error)) from error
        raise


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise click.ClickException(f"this command needs {module}: pip install 'preblock[{extra}]'")


def _newest(repository: Path, name: str) -> Path:
    from preblock.service.core.errors import NotFound
    from preblock.service.runtime.repository import find_artifacts

    artifacts = find_artifacts(repository)
    folders = [folder for found, _, folder in artifacts if found == name]
    if not folders:
        raise NotFound("NAME", name, ", ".join(dict.fromkeys(found for found, _, _ in artifacts)))
    return folders[-1]


def _limits(manifest: Any) -> str:
    if manifest.kind == "stem":
        return f"{manifest.family}, {manifest.input.name} {list(manifest.input.shape)}, width {manifest.width}"
    indices = "".join(f", {name} 0 to {count - 1}" for name, count in manifest.indices.items())
    return (
        f"{manifest.family}, ids 0 to {manifest.vocab_size - 1}{indices}, "
        f"max_len {manifest.max_len or 'unlimited'}, width {manifest.width}"
    )


def _storage(manifest: Any, report: Any) -> str:
    return f"stored as {manifest.stored_as}: {report.storage_summary()}"


class _Progress:
    """Shows each step on standard error: in one line that changes on a terminal, in few lines, or none, elsewhere."""

    def __init__(self, name: str, quiet: bool = False) -> None:
        self._name = name
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._topic = ""
        self._said = 0.0

    def __call__(self, step: str) -> None:
        topic, now = step.partition(": ")[0], time.monotonic()
        if self._terminal:  # a line that is too long could not be cleared
            line = f"{self._name}: {step}"[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r\033[K{line}", nl=False, err=True)
        elif self._quiet:
            return
        elif topic != self._topic or now - self._said >= PAUSE:
            click.echo(f"{self._name}: {topic if topic != self._topic else step}", err=True)
            self._said = now
        self._topic = topic

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._topic:
            click.echo("\r\033[K", nl=False, err=True)
