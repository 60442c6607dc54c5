"""The command to measure a server: `bench`."""

import json
import math
import re
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

import click

from preblock.cli.options import split_version
from preblock.cli.progress import ProgressLine


def shape(text: str) -> tuple[int, int]:
    """Parse rows and tokens per row, such as 8,128."""
    if not re.fullmatch("0*[1-9][0-9]*,0*[1-9][0-9]*", text):
        raise click.BadParameter(f"{text!r} is not rows and tokens of each, such as 8,128")
    rows, tokens = text.split(",")
    return int(rows), int(tokens)


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is not a positive number of seconds")


@click.command()
@click.argument("url")
@click.option("--model", required=True, metavar="NAME[@VERSION]", help="Model to measure; default its highest version.")
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
    type=shape,
    metavar="ROWS,TOKENS",
    default=["1,1", "1,128", "8,128"],
    help="Rows and tokens of a request, such as 8,128; may be repeated. Default 1,1, then 1,128, then 8,128.",
)
@click.option("--connections", type=click.IntRange(1), default=4, help="Number of concurrent connections; default 4.")
@click.option("--seconds", type=seconds, default=5.0, help="Seconds to measure each protocol and shape; default 5.")
@click.option(
    "--timeout", type=seconds, default=30.0, help="Seconds to wait for a connection, and for an answer; default 30."
)
@click.option("--grpc-port", type=click.IntRange(1, 65535), help="gRPC port of the server, for the protocol grpc.")
@click.option("--key", envvar="PREBLOCK_API_KEY", help="API key; default PREBLOCK_API_KEY, which `ps` does not show.")
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
    """Measure throughput and latency of the server at URL.

    Each connection sends a request, waits for its answer, and sends the next. The exit code is 1 if
    every request of a protocol and shape failed, or the first connection of one. Results until then are printed.

    \b
    Examples:
      preblock bench http://127.0.0.1:8000 --model minilm
      preblock bench http://127.0.0.1:8000 --model minilm@2 --shape 8,128 --protocol npy --protocol v2 --seconds 10
    """
    if "grpc" in protocols and grpc_port is None:
        raise click.UsageError("the protocol grpc needs --grpc-port, the port of the server's gRPC")
    name, version = split_version(model)
    from preblock import connect
    from preblock.bench.load import measure
    from preblock.bench.report import table
    from preblock.bench.system import describe_system
    from preblock.bench.workload import LoadTarget
    from preblock.client.errors import ClientError

    try:
        target = LoadTarget(url, name, key, grpc_port, version)
        with connect(url, timeout=timeout, key=key, retries=0) as client:
            description = client.model(name, version)
        system = describe_system(target, description, timeout)
    except (ClientError, OSError) as error:
        raise click.ClickException(str(error)) from error
    options |= {"timeout": timeout}
    results, failure = [], None
    try:
        for protocol, sizes in product(protocols, shapes):
            with ProgressLine("bench", quiet=True) as progress:
                results.append(measure(target, description, protocol, sizes, report=progress, **options))
    except ClientError as error:
        failure = str(error)
    except OSError as error:
        failure = f"no connection to {target.host}:{target.port} ({error})"
    if failure is not None and not results:
        raise click.ClickException(failure)
    if as_json:
        documents = [result.document() for result in results]
        click.echo(json.dumps({"system": asdict(system), "results": documents}))
    else:
        click.echo(f"{system.summary()}\n\n{table(results)}")
    if failure is not None:
        raise click.ClickException(failure)
    sys.exit(not all(result.requests for result in results))
