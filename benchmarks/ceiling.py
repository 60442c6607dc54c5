"""The highest rate of `preblock bench`: its load against canned bytes, beside its load against Preblock.

    python -m benchmarks.ceiling [--rounds N] [--seconds S]

Requests (1, 1) of gpt2-small in `model_repository` over 4 connections, protocol by protocol, first from a server of
canned bytes, then from Preblock. The servers run on one core, the load on another. Over HTTP the canned server answers
without parsing; over gRPC and WebSocket it is a bare handler. Exits with 1 if Preblock reaches the rate of the canned
bytes.
"""

import argparse
import asyncio
import os
import statistics
import sys
from typing import cast

import uvloop

from benchmarks.servers import PREBLOCK
from benchmarks.streams import MODEL, SERVER_CORE, WIDTH, be_the_client, running
from preblock.bench.load import PROTOCOLS, measure
from preblock.bench.workload import LoadTarget
from preblock.client import connect
from tests.support.servers import free_port

SHAPE = (1, 1)


class Canned(asyncio.Protocol):
    """Answers each read with the zero vector of one token."""

    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {4 * WIDTH}\r\n\r\n"
    answer = head.encode() + bytes(4 * WIDTH)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - as asyncio has it
        """Answer."""
        self._transport.write(self.answer)


async def serve() -> None:
    """Serve canned bytes, and print the port."""
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve())
    be_the_client()
    pinned = ("taskset", "-c", SERVER_CORE)
    grpc_port, bare_port = free_port(), free_port()
    with (
        running(*pinned, PREBLOCK, "serve", "--port", 0, "--grpc-port", grpc_port) as (_, port),
        running(*pinned, sys.executable, "-m", "benchmarks.ceiling", "--serve") as (_, canned_port),
        running(*pinned, sys.executable, "-m", "benchmarks.fixed_responses", free_port(), bare_port) as (_, echo_port),
    ):
        ours = LoadTarget(f"http://127.0.0.1:{port}", MODEL, grpc_port=grpc_port)
        with connect(ours.url) as client:
            model = client.model(MODEL)
        bare = {
            protocol: LoadTarget(
                f"http://127.0.0.1:{echo_port if protocol == 'steps' else canned_port}", MODEL, None, bare_port
            )
            for protocol in PROTOCOLS
        }
        found: dict[str, list[tuple[float, float]]] = {protocol: [] for protocol in PROTOCOLS}
        for _ in range(options.rounds):
            for protocol in PROTOCOLS:
                results = [
                    measure(target, model, protocol, SHAPE, seconds=options.seconds)
                    for target in (bare[protocol], ours)
                ]
                for result in results:
                    if result.errors:
                        raise SystemExit(f"{protocol}: {result.messages}")
                found[protocol].append((results[0].rates["requests"], results[1].rates["requests"]))
    print(f"load {os.getloadavg()[0]:.1f}; medians of {options.rounds} rounds of {options.seconds:g} s, {SHAPE}\n")
    print("| protocol | canned bytes, requests/s | Preblock, requests/s |\n|---|---|---|")
    slower = False
    for protocol, rounds in found.items():
        ceiling, rate = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        print(f"| `{protocol}` | {ceiling:,.0f} | {rate:,.0f} |")
        slower |= ceiling <= rate
    sys.exit(slower)


if __name__ == "__main__":
    main()
