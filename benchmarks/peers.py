"""The same graph behind other servers: requests per second over HTTP and gRPC, in one run, and a table of them.

    python -m benchmarks.peers [--rounds N] [--seconds S] [--only NAME ...]

serves gpt2-small of `model_repository` on one core, by Preblock and by what others write instead
(`benchmarks/servers.py` says how each is set up and started, `benchmarks/peers/` holds their handlers); `wrk`
(https://github.com/wg/wrk), which must be installed, asks over 4 connections on another core, and four threads of
tritonclient where the protocol is gRPC. Each server has a virtual environment of its own below `.venv/peers`, which is
made the first time. All are started, and stand still (SIGSTOP) but when it is their turn; in each round all take turns,
shape by shape. Before, every answer is held against onnxruntime's own. Writes the table into docs/benchmarks.md, unless
only some servers were measured; a server that cannot be installed or started is said so there.
"""

import argparse
import datetime
import io
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
import orjson
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.environments import CannotRun
from benchmarks.servers import GRAPH, SERVERS, RunningPeer, canned, started
from benchmarks.streams import MODEL, WIDTH, be_the_client
from benchmarks.tensors import CONNECTIONS, SHAPES, rate, script

DOCUMENT = Path("docs/benchmarks.md")
BEGIN, END = "<!-- written by benchmarks.peers -->\n", "<!-- end -->\n"
SLOW = 5.0
"""Seconds of an answer from which on a case is not measured."""

Shape = tuple[int, int]
Case = tuple[str, Shape]
"""A line of the table, and a shape."""


def main() -> None:
    """Measure, print the table, and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=list(SERVERS), metavar="NAME")
    options = parser.parse_args()
    be_the_client()
    load = os.getloadavg()[0]
    random = np.random.default_rng(0)
    ids = {shape: random.integers(0, 50257, shape) for shape in SHAPES}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, RunningPeer] = {}
        for name in options.only:
            try:
                servers[name] = stack.enter_context(started(name))
            except CannotRun as error:
                reasons[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
        works = cases(servers, ids, folder, options.seconds)
        found: dict[Case, list[float]] = {case: [] for case in works}
        for turn in range(options.rounds):
            for (line, shape), (server, work) in works.items():
                try:
                    with server.awake():
                        found[line, shape].append(work())
                except (CannotRun, RuntimeError) as error:  # no answer, or answers that broke off
                    print(f"{line} {shape}: {error}", file=sys.stderr)
                    found[line, shape].append(math.nan)
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    text = table(found, reasons)
    print(text)
    if options.only == list(SERVERS):
        write(f"{heading(options, load)}\n\n{text}")


def cases(
    servers: dict[str, RunningPeer], ids: dict[Shape, Any], folder: Path, seconds: float
) -> dict[Case, tuple[RunningPeer, Callable[[], float]]]:
    """Return what is measured, each server's answer having been held against the truth."""
    session = onnxruntime.InferenceSession(GRAPH)
    works: dict[Case, tuple[RunningPeer, Callable[[], float]]] = {}
    for shape, values in ids.items():
        truth = session.run(["embeddings"], {"input_ids": values, "offset": np.zeros(1, np.int64)})[0]
        for name, running in servers.items():
            protocol = running.server.protocol(values)
            lua = script(folder, f"{name}-{shape[0]}-{shape[1]}", protocol)
            over_http = partial(rate, running.ports.http, protocol.path, lua, connections=CONNECTIONS)
            over_grpc = partial(grpc_rate, running.ports.grpc, values, connections=CONNECTIONS)
            ways = [(running.server.title, partial(by_http, running, values), over_http)]
            if running.server.grpc:
                ways.append((running.server.title_of_grpc, partial(infer, running.ports.grpc, values), over_grpc))
            for title, ask, work in ways:
                took = proven(title, running, ask, None if running.server.protocol is canned else truth)
                works[title, shape] = running, asked(took, seconds, work)
    return works


def proven(title: str, running: RunningPeer, ask: Callable[[], Any], truth: Any) -> float:
    """Return how long an answer takes, having held it against the truth if there is one; infinite if there is none."""
    try:
        with running.awake():
            begin = time.perf_counter()
            vectors = ask()
            took = time.perf_counter() - begin
    except (CannotRun, InferenceServerException) as error:
        print(f"{title}: {error}", file=sys.stderr)
        return math.inf
    if truth is not None and not np.array_equal(np.ravel(np.asarray(vectors, np.float32)), truth.ravel()):
        raise SystemExit(f"{title}: the answer is not the vectors of the ids {truth.shape[:2]}")
    return took


def asked(took: float, seconds: float, work: Callable[[float], float]) -> Callable[[], float]:
    """Return `work` for so many seconds, or as many as four answers take; no number where one takes too long."""
    if took > SLOW:
        return lambda: math.nan
    return lambda: work(max(seconds, math.ceil(4 * took)))


def by_http(running: RunningPeer, ids: Any) -> Any:
    """Return the vectors that come over HTTP, in whichever form they are."""
    answer = running.ask(ids)
    if answer.startswith(b"\x93NUMPY"):
        return np.load(io.BytesIO(answer))
    size = 4 * ids.size * WIDTH
    if len(answer) > 2 * size:  # text
        document = orjson.loads(answer)
        return document["outputs"][0]["data"] if isinstance(document, dict) else document
    return np.frombuffer(answer[-size:], np.float32)


def infer(port: int, ids: Any) -> Any:
    """Return the vectors that come over gRPC."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(MODEL, [tensor(ids)]).as_numpy("embeddings")


def tensor(ids: Any) -> Any:
    """Return ids as tritonclient sends them."""
    return triton.InferInput("input_ids", ids.shape, "INT64").set_data_from_numpy(ids)


def grpc_rate(
    port: int, ids: Any, seconds: float, connections: int, metadata: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Return how many requests of gRPC were answered in a second, by as many threads as connections."""
    # tritonclient takes a dict, and names of gRPC are lower case.
    headers = {name.lower(): value for name, value in metadata.items()}
    counts: list[int] = []
    ready = threading.Barrier(connections + 1, timeout=60)

    def ask() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        with triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options) as client:
            inputs, count = [tensor(ids)], 0
            client.infer(MODEL, inputs, headers=headers)
            ready.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                client.infer(MODEL, inputs, headers=headers)
                count += 1
            counts.append(count)

    threads = [threading.Thread(target=ask) for _ in range(connections)]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def table(found: dict[Case, list[float]], reasons: dict[str, str]) -> str:
    """Return the medians, and below them the slowest and the fastest round."""
    lines = ["| server, protocol |" + "".join(f" {shape} |" for shape in SHAPES), "|---|" + "---|" * len(SHAPES)]
    titles = dict.fromkeys(title for title, _ in found)
    lines += [f"| {title} |" + "".join(f" {cell(found[title, shape])} |" for shape in SHAPES) for title in titles]
    for name, reason in reasons.items():
        lines.append(f"| {SERVERS[name].title} |" + " could not run |" * len(SHAPES))
        reasons[name] = f"{SERVERS[name].title}: {reason}"
    return "\n".join([*lines, *(f"\nCould not run: {reason}." for reason in reasons.values())]) + "\n"


def cell(rates: list[float]) -> str:
    """Return the median of the rounds and their spread."""
    if any(map(math.isnan, rates)):
        return "-"
    middle = statistics.median(rates)
    return f"{rounded(middle)} ({rounded(min(rates))} to {rounded(max(rates))})" if len(rates) > 1 else rounded(middle)


def rounded(number: float) -> str:
    """Return a rate in three digits."""
    return f"{float(f'{number:.3g}'):,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number else "0"


def heading(options: argparse.Namespace, load: float) -> str:
    """Say what was measured, on what, and when."""
    return (
        f"Requests per second, medians of {options.rounds} rounds of {options.seconds:g} s for each case, and their "
        f"spread; {processor()}, {os.cpu_count()} virtual cores, Python {platform.python_version()}, "
        f"{datetime.date.today():%-d %B %Y}, load {load:.1f} as it began. A dash: an "
        f"answer took over {SLOW:g} s, or broke off. Every case lasts at least as long as four of its answers."
    )


def processor() -> str:
    """Return what the processor calls itself."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write(text: str) -> None:
    """Replace what the last run wrote into the document."""
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{DOCUMENT}: there is no place for the table between {BEGIN.strip()} and {END.strip()}")
    DOCUMENT.write_text(before + BEGIN + "\n" + text + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
