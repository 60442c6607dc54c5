"""Check the floors of protocols, start-up and memory of workers, each against a reference in the same run.

    python -m benchmarks.floors [--rounds N] [--seconds S]
    python -m benchmarks.floors --with keys tracing proxies lines pages

Serves gpt2-small of `model_repository` on one core; `wrk` and tritonclient run on another, as in `benchmarks.peers`.
Both sides of a ratio take turns in every round; the figures are medians over the rounds. Exits with 1 if a floor is
missed or its reference could not run. `--with` turns on optional features of `benchmarks/guards.py`. TLS is excluded,
because it belongs to the connections and not to the compared work.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from benchmarks.environments import CannotRun
from benchmarks.guards import GUARDS, guarded
from benchmarks.peers import grpc_rate
from benchmarks.servers import GRAPH, JSON, PREBLOCK, RunningPeer, descendants, started
from benchmarks.streams import MODEL, SERVER_CORE, be_the_client, memory_of, running
from benchmarks.tensors import CONNECTIONS, SHAPES, Protocol, native, rate, script, with_headers

SMALL, MIDDLE, LARGE = (1, 1), (8, 128), (32, 512)
WORKERS = 4
IMPORTS = "import fastapi, uvicorn, numpy, onnxruntime"

Work = Callable[[], float]


class Floor(NamedTuple):
    """A figure with its limit.

    Args:
        name: name of the figure.
        allowed: lower or upper limit of its median.
        most: whether `allowed` is the upper limit.
        found: value of every round; empty if it could not be measured.

    """

    name: str
    allowed: float
    most: bool
    found: list[float]

    @property
    def held(self) -> bool:
        """Whether the median is within the limit."""
        if not self.found:
            return False
        middle = statistics.median(self.found)
        return middle <= self.allowed if self.most else middle >= self.allowed

    def __str__(self) -> str:
        bound = f"{'at most' if self.most else 'at least'} {self.allowed:g}"
        if not self.found:
            return f"MISSED  {self.name}: not measured, {bound}"
        figure = f"{statistics.median(self.found):.3g} ({min(self.found):.3g} to {max(self.found):.3g})"
        return f"{'held  ' if self.held else 'MISSED'}  {self.name}: {figure}, {bound}"


def main() -> None:
    """Measure, print every figure with its floor, and exit with 1 if one is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    guards = [name for name in GUARDS if name != "tls"]
    parser.add_argument("--with", nargs="+", choices=guards, default=[], dest="guards", help="features to turn on")
    options = parser.parse_args()
    be_the_client()
    # Compile modules once, as in an installation; the first start does it and is not counted.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    on = f", with {' '.join(options.guards)}" if options.guards else ""
    print(f"load {os.getloadavg()[0]:.1f} as it begins{on}; medians of {options.rounds} rounds and their spread")
    floors = []
    with tempfile.TemporaryDirectory() as folder, guarded(options.guards, Path(folder)) as headers:
        for measured in (rates(options.rounds, options.seconds, headers), start(options.rounds), memory(headers)):
            for floor in measured:
                print(floor, flush=True)
                floors.append(floor)
    sys.exit(not all(floor.held for floor in floors))


def rates(rounds: int, seconds: float, headers: dict[str, str]) -> Iterator[Floor]:
    """Compare the rates of protocols, and the latency of small requests beside large ones.

    `headers` are added to each request.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ids = {shape: np.random.default_rng(0).integers(0, 50257, shape) for shape in SHAPES}
        ours, bare = (stack.enter_context(started(name, headers)) for name in ("preblock", "floor"))
        other: RunningPeer | None = None
        try:
            other = stack.enter_context(started("mlserver"))
        except CannotRun as error:
            print(f"MLServer: {error}", file=sys.stderr)

        def over_grpc(server: RunningPeer) -> Work:
            return partial(grpc_rate, server.ports.grpc, ids[MIDDLE], seconds, CONNECTIONS, headers)

        def over_http(server: RunningPeer, name: str, protocol: Protocol) -> Work:
            lua = script(folder, name, with_headers(protocol, headers))
            return partial(rate, server.ports.http, protocol.path, lua, seconds, CONNECTIONS)

        def compare(name: str, allowed: float, one: Work, server: RunningPeer | None, work: Work | None) -> Floor:
            found = [] if server is None or work is None else ratios(rounds, (ours, one), (server, work))
            return Floor(name, allowed, False, found)

        binary = over_http(ours, "binary", native(ids[MIDDLE]))
        floats = over_http(ours, "floats", as_json(ids[MIDDLE], "float"))
        base64 = over_http(ours, "base64", as_json(ids[MIDDLE], "base64"))
        theirs = over_http(other, "mlserver", other.server.protocol(ids[MIDDLE])) if other else None
        called = over_grpc(ours)
        yield compare("gRPC (8, 128), over bare grpc.aio with canned bytes", 0.7, called, bare, over_grpc(bare))
        yield compare("gRPC (8, 128), over MLServer's", 5, called, other, over_grpc(other) if other else None)
        yield compare("JSON floats (8, 128), over MLServer's V2 JSON", 3, floats, other, theirs)
        yield compare("JSON base64 (8, 128), over .npy", 0.5, base64, ours, binary)
        with ours.awake():
            small, large = (
                script(folder, name, with_headers(native(ids[shape]), headers))
                for name, shape in (("s", SMALL), ("l", LARGE))
            )
            found = [beside(ours.ports.http, small, large, seconds) for _ in range(rounds)]
        yield Floor("p99 of (1, 1) beside one connection of (32, 512), over p99 alone", 5, True, found)


def ratios(rounds: int, one: tuple[RunningPeer, Work], other: tuple[RunningPeer, Work]) -> list[float]:
    """Return the ratio of the rates of `one` and `other` in every round."""
    found = []
    for _ in range(rounds):
        both = []
        for server, work in (one, other):
            with server.awake():
                both.append(work())
        found.append(both[0] / max(both[1], 1e-9))
    return found


def as_json(ids: Any, encoding: str) -> Protocol:
    """Request vectors from the native API in JSON."""
    return Protocol(f"/models/{MODEL}/embed", orjson.dumps({"input_ids": ids.tolist(), "encoding": encoding}), JSON)


def beside(port: int, small: Path, large: Path, seconds: float) -> float:
    """Return the ratio of the p99 of small requests with and without a connection of large requests beside them."""
    alone = percentile(port, small, seconds)
    with asking(port, large, seconds + 2):
        return percentile(port, small, seconds) / alone


@contextmanager
def asking(port: int, lua: Path, seconds: float) -> Iterator[None]:
    """Send requests over one connection during the block."""
    with subprocess.Popen(wrk(port, lua, seconds, 1), stdout=subprocess.DEVNULL) as process:
        time.sleep(0.5)
        try:
            yield
        finally:
            process.terminate()


def percentile(port: int, lua: Path, seconds: float) -> float:
    """Return the p99 of the latency in milliseconds."""
    done = subprocess.run(
        [*wrk(port, lua, seconds, CONNECTIONS), "--latency"], capture_output=True, text=True, check=True
    )
    (number, unit) = re.findall(r"99%\s+([\d.]+)(us|ms|s)", done.stdout)[0]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def wrk(port: int, lua: Path, seconds: float, connections: int) -> list[str]:
    """Return the wrk command for the native API."""
    address = f"http://127.0.0.1:{port}/models/{MODEL}/embed"
    command = ("wrk", "-t", 1, "-c", connections, "-d", f"{seconds:g}s", "--timeout", "60s", "-s", lua, address)
    return list(map(str, command))


def start(rounds: int) -> Iterator[Floor]:
    """Compare the start of `preblock serve` with the time of the imports in `IMPORTS`."""
    pinned = ("taskset", "-c", str(SERVER_CORE))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / MODEL
        model.mkdir()
        (model / "1").symlink_to(GRAPH.parent.resolve())
        for turn in range(rounds + 1):
            begin = time.perf_counter()
            with running(*pinned, PREBLOCK, "serve", "--port", 0, "--repository", folder) as (_, port):
                ready = time.perf_counter() - begin
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").close()  # before its output is closed
            begin = time.perf_counter()
            subprocess.run([*pinned, sys.executable, "-c", IMPORTS], check=True)
            if turn:  # the first start reads the files into memory
                found.append(ready / (time.perf_counter() - begin))
    yield Floor(f"ready, over the time of `{IMPORTS}`", 1.5, True, found)


def memory(headers: dict[str, str]) -> Iterator[Floor]:
    """Measure the memory of several workers without their shared tables. `headers` are added to each request."""
    options = ("--port", 0, "--workers", WORKERS)
    with tempfile.TemporaryDirectory() as folder, running(PREBLOCK, "serve", *options) as (pid, port):
        time.sleep(5)  # until all workers serve
        for number, shape in enumerate(SHAPES[:3]):
            protocol = with_headers(native(np.random.default_rng(0).integers(0, 50257, shape)), headers)
            rate(port, protocol.path, script(Path(folder), f"warm{number}", protocol), 1, 8 * WORKERS)
        processes = descendants(pid)
        total = sum(map(memory_of, processes)) - sum(map(table_of, processes))
    yield Floor(f"MB of each of {WORKERS} workers, without the tables", 90, True, [total / WORKERS / 1e6])


def table_of(pid: int) -> int:
    """Return the proportional set size of the data files mapped by a process, in bytes."""
    found, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            counts = line.endswith(".onnx.data")
        elif counts and line.startswith("Pss:"):
            found += 1024 * int(line.split()[1])
    return found


if __name__ == "__main__":
    main()
