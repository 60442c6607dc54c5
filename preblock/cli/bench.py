"""The command to measure a server: `bench`."""

import json
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from preblock.cli.options import require
from preblock.cli.progress import ProgressLine

F = TypeVar("F", bound=Callable[..., Any])


class ShapeType(click.ParamType[tuple[int, int]]):
    """The parameter type of rows and tokens per row, such as 8,128."""

    name = "rows,tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return rows and tokens as two integers."""
        if isinstance(value, tuple):
            return value
        sizes = value.split(",")
        if len(sizes) != 2 or not all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes):
            self.fail(f"got {value}, allowed rows and tokens of each, such as 8,128", param, ctx)
        return int(sizes[0]), int(sizes[1])


class SecondsType(click.FloatRange):
    """The parameter type of a positive, finite number of seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return a finite number of seconds."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"got {value}, allowed a number of seconds", param, ctx)
        return seconds


def _seconds_option(name: str, default: float, text: str) -> Callable[[F], F]:
    return click.option(name, type=SecondsType(0, min_open=True), default=default, show_default=True, help=text)


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="Name of the model.")
@click.option(
    "--protocol",
    "protocols",
    multiple=True,
    type=click.Choice(["npy", "v2", "json", "grpc", "steps"]),
    default=["npy"],
    help="Format of the requests, default npy; may be repeated. steps: steps of a decode stream.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=ShapeType(),
    default=[(1, 1), (1, 128), (8, 128)],
    help="Rows and tokens of each, such as 8,128; may be repeated. Default 1,1, then 1,128, then 8,128.",
)
@click.option(
    "--connections", type=click.IntRange(1), default=4, show_default=True, help="Number of concurrent connections."
)
@_seconds_option("--seconds", 5.0, "Seconds to measure each protocol and shape.")
@_seconds_option("--timeout", 30.0, "Seconds to wait for a connection, and for an answer.")
@click.option("--grpc-port", type=click.IntRange(1, 65535), help="gRPC port of the server, for the protocol grpc.")
@click.option("--key", help="API key for the server.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
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
    """Measure the throughput and latency of the server at URL.

    Each connection sends a request, waits for its answer, and sends the next. The exit code is 1 if all requests of
    a protocol and shape failed.
    """
    if "grpc" in protocols and grpc_port is None:
        raise click.UsageError("--grpc-port: got nothing, allowed the port of the server's gRPC, for the protocol grpc")
    require("httpx", "client")
    require("websockets", "client")
    from preblock import connect
    from preblock.bench.load import measure
    from preblock.bench.report import table
    from preblock.bench.workload import LoadTarget
    from preblock.client.errors import ClientError

    results = []
    try:
        target = LoadTarget(url, model, key, grpc_port)
        with connect(url, timeout=timeout, key=key, retries=0) as client:
            description = client.model(model)
        for protocol in protocols:
            for shape in shapes:
                with ProgressLine("bench", quiet=True) as progress:
                    result = measure(target, description, protocol, shape, timeout=timeout, report=progress, **options)
                results.append(result)
    except (ClientError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([result.document() for result in results]))
    else:
        click.echo(table(results))
    sys.exit(not all(result.requests for result in results))
