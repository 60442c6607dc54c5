"""CPU time per request of eight servers behind HAProxy, over one server behind HAProxy.

    python -m benchmarks.replicas [--rounds N] [--seconds S] [--cores N]

Needs HAProxy. Serves gpt2-small of `model_repository` with the settings of `deploy/haproxy`. The servers run in turn on
the first N cores, one by default; the proxies and the load of `preblock bench` run on the next N. In each round one
server and eight take turns, with 1 and with 8 connections in all. Prints for each shape the medians of CPU time and of
context switches per request, and three ratios:

- with 8 connections each: the same load;
- with 1 connection each: one request at a time, so only cold caches cost more;
- eight servers with 8 connections, over one server with 1: the same number of connections for each server.
"""

import argparse
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import PREBLOCK
from benchmarks.streams import MODEL, be_the_client, running
from preblock.bench.load import measure
from preblock.bench.workload import LoadTarget
from preblock.client import connect
from preblock.client.results import Model
from tests.support.haproxy import deployed_settings, haproxy
from tests.support.servers import free_port

REPLICAS = 8
SHAPES = ((1, 1), (1, 128), (8, 128), (32, 512))


class Fleet(NamedTuple):
    """The processes of the servers behind one proxy, and its address."""

    pids: list[int]
    proxy: str


class Usage(NamedTuple):
    """CPU time in microseconds, and context switches, each of a request or of processes since their start."""

    microseconds: float
    switches: float


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--cores", type=int, default=1, help="cores of the servers (default: 1)")
    options = parser.parse_args()
    be_the_client(set(range(options.cores, 2 * options.cores)))
    with serve(1, options.cores) as one, serve(REPLICAS, options.cores) as eight:
        with connect(one.proxy) as client:
            model = client.model(MODEL)
        print(f"load {os.getloadavg()[0]:.1f}; medians of {options.rounds} rounds of {options.seconds:g} s")
        candidates = [(fleet, connections) for fleet in (one, eight) for connections in (1, REPLICAS)]
        titles = [f"{len(fleet.pids)} servers, {connections} connections" for fleet, connections in candidates]
        print("| shape |", " | ".join(titles), "| same load | one at a time | same connections |")
        print("|---" * 8 + "|")
        for shape in SHAPES:
            found: list[list[Usage]] = [[] for _ in candidates]
            for _ in range(options.rounds):
                for place in random.sample(range(len(candidates)), len(candidates)):
                    fleet, connections = candidates[place]
                    found[place].append(load(fleet, model, shape, connections, options.seconds))
            medians = [Usage(*map(statistics.median, zip(*usages, strict=True))) for usages in found]
            (one_1, one_8, eight_1, eight_8) = (usage.microseconds for usage in medians)
            ratios = (eight_8 / one_8, eight_1 / one_1, eight_8 / one_1)
            cells = [f"{usage.microseconds:.0f} us, {usage.switches:.2f} switches" for usage in medians]
            print(f"| {shape} |", " | ".join([*cells, *(f"{ratio:.2f}" for ratio in ratios)]), "|", flush=True)
        print(f"{REPLICAS} idle servers use {idle(eight, options.seconds):.1%} of a core")


@contextmanager
def serve(count: int, cores: int) -> Iterator[Fleet]:
    """Run servers in turn on the first cores, and a proxy before them."""
    with ExitStack() as stack:
        folder, port = Path(stack.enter_context(tempfile.TemporaryDirectory())), free_port()
        command = (PREBLOCK, "serve", "--port", 0, "--log-level", "warning")
        servers = [stack.enter_context(running("taskset", "-c", number % cores, *command)) for number in range(count)]
        settings = deployed_settings([f"http://127.0.0.1:{port}" for _, port in servers], port)
        yield Fleet([pid for pid, _ in servers], stack.enter_context(haproxy(settings, port, folder)))


def idle(fleet: Fleet, seconds: float) -> float:
    """Return the CPU time of idle servers in a second, health checks included."""
    before = sum(usage(pid).microseconds for pid in fleet.pids)
    time.sleep(seconds)
    return (sum(usage(pid).microseconds for pid in fleet.pids) - before) / seconds / 1e6


def load(fleet: Fleet, model: Model, shape: tuple[int, int], connections: int, seconds: float) -> Usage:
    """Put the servers under load; return their usage per request."""
    before = [usage(pid) for pid in fleet.pids]
    result = measure(LoadTarget(fleet.proxy, MODEL), model, "npy", shape, connections=connections, seconds=seconds)
    after = [usage(pid) for pid in fleet.pids]
    if result.errors:
        raise SystemExit(f"{shape}: {result.messages}")
    spent = (sum(column) for column in zip(*after, strict=True))
    spent_before = (sum(column) for column in zip(*before, strict=True))
    return Usage(*((late - early) / result.requests for late, early in zip(spent, spent_before, strict=True)))


def usage(pid: int) -> Usage:
    """Return the usage of a process since its start; all its threads count."""
    nanoseconds, switches = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
        switches += sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", (task / "status").read_text())))
    return Usage(nanoseconds / 1000, switches)


if __name__ == "__main__":
    main()
