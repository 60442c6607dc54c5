"""Growth of latency and memory with rows, tokens of a row, table size, models and connections.

    python -m benchmarks.growth [--rounds N] [--seconds S]

Linux only. Serves front-ends of width 768 with random tables, and sends `.npy` requests with the load of `preblock
bench`. Prints a table for each dimension: median latency, rates, anonymous memory of the server after the load, and
peak resident memory, mapped files included. For models and table size it also prints the start-up time. Servers run on
one core, the load on another.
"""

import argparse
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.servers import PREBLOCK
from benchmarks.streams import SERVER_CORE, be_the_client, running
from preblock.bench.load import measure
from preblock.bench.workload import LoadTarget
from preblock.client import connect
from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import GPT2Embeddings
from preblock.service.artifacts.manifest import Source
from tests.support.weights import seeded_

WIDTH, POSITIONS, VOCABULARY = 768, 8192, 50257
ROWS = [(rows, 128) for rows in (1, 2, 4, 8, 16, 32, 64, 128)]
LENGTHS = [(1, length) for length in (1, 8, 64, 512, 2048, 8192)]
TABLES = (1_000, 10_000, 50_000, 250_000)
MODELS = (1, 4, 16, 64)
CONNECTIONS = (1, 4, 16, 64, 256)
SMALL, MIDDLE = (1, 1), (8, 128)
HEAD = "latency ms | requests/s | MB/s | memory MB | peak MB |"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    be_the_client()
    print(f"load {os.getloadavg()[0]:.1f} as it begins; medians of {options.rounds} rounds of {options.seconds:g} s\n")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for text in sections(root, Meter(options.rounds, options.seconds)):
            print(text, flush=True)


def sections(root: Path, meter: "Meter") -> Iterator[str]:
    """Yield the lines of every table."""
    write(root / "one", "m0", VOCABULARY)
    with serve(root / "one") as (pid, port, _):
        yield f"| rows of 128 tokens | {HEAD}\n|---|---|---|---|---|---|"
        for shape in ROWS:
            yield f"| {shape[0]} | {meter.line(pid, port, shape)}"
        yield f"\n| tokens of one row | {HEAD}\n|---|---|---|---|---|---|"
        for shape in LENGTHS:
            yield f"| {shape[1]} | {meter.line(pid, port, shape)}"
        for shape in (SMALL, MIDDLE):
            yield f"\n| connections, {shape} | {HEAD}\n|---|---|---|---|---|---|"
            for connections in CONNECTIONS:
                yield f"| {connections} | {meter.line(pid, port, shape, connections)}"
    yield f"\n| ids of the table, {MIDDLE} | ready s | {HEAD}\n|---|---|---|---|---|---|---|"
    for size in TABLES:
        folder = root / f"table-{size}"
        write(folder, "m0", size)
        with serve(folder) as (pid, port, ready):
            yield f"| {size:,} | {ready:.2f} | {meter.line(pid, port, MIDDLE)}"
    yield f"\n| models of 1,000 ids, {SMALL} | ready s | {HEAD}\n|---|---|---|---|---|---|---|"
    for count in MODELS:
        folder = root / "models"
        for number in range(len(list(folder.glob("*"))), count):
            if number:  # an artifact is the same under any name
                shutil.copytree(folder / "m0", folder / f"m{number}")
            else:
                write(folder, "m0", 1_000)
        with serve(folder) as (pid, port, ready):
            yield f"| {count} | {ready:.2f} | {meter.line(pid, port, SMALL)}"


@contextmanager
def serve(repository: Path) -> Iterator[tuple[int, int, float]]:
    """Serve a repository on one core; yield the process id, the port, and the start-up seconds.

    A first start fills the cache of verified files.
    """
    cache = repository.parent / "cache"
    options = ("--port", 0, "--repository", repository, "--cache-dir", cache)
    with (
        running("taskset", "-c", SERVER_CORE, PREBLOCK, "serve", *options) as (_, port),
        connect(address(port)) as client,
    ):
        client.models()
    begin = time.perf_counter()
    with running("taskset", "-c", SERVER_CORE, PREBLOCK, "serve", *options) as (pid, port):
        yield pid, port, time.perf_counter() - begin


def address(port: int) -> str:
    """Return the URL of a local server."""
    return f"http://127.0.0.1:{port}"


def write(root: Path, name: str, vocabulary: int) -> None:
    """Export a front-end of learned positions with random tables."""
    frontend = GPT2Embeddings(vocabulary, WIDTH, POSITIONS)
    seeded_(frontend, 0)
    export_loaded(LoadedSource(frontend.data(), Source(kind="module")), name, root)


class Meter:
    """Asks for a shape over and over."""

    def __init__(self, rounds: int, seconds: float) -> None:
        self._rounds, self._seconds = rounds, seconds

    def line(self, pid: int, port: int, shape: tuple[int, int], connections: int = 1) -> str:
        """Return the cells of a table row: medians of the rounds."""
        target = LoadTarget(address(port), "m0")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins here
        with connect(target.url) as client:
            model = client.model(target.model)
        results = [
            measure(target, model, "npy", shape, connections=connections, seconds=self._seconds)
            for _ in range(self._rounds)
        ]
        if any(result.errors for result in results):
            raise SystemExit(f"{shape}: {[result.messages for result in results]}")
        latency, rate, data = (
            statistics.median(values)
            for values in zip(
                *((r.milliseconds["p50"], r.rates["requests"], r.rates["bytes"] / 1e6) for r in results), strict=True
            )
        )
        return f"{latency:.3g} | {rate:,.0f} | {data:,.0f} | {own_memory(pid):.1f} | {status(pid, 'VmHWM'):.1f} |"


def own_memory(pid: int) -> float:
    """Return the anonymous memory of a process in MB."""
    return status(pid, "RssAnon")


def status(pid: int, name: str) -> float:
    """Return a size in /proc/PID/status in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[0]) / 1e6


if __name__ == "__main__":
    main()
