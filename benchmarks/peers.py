"""Requests per second of Preblock and other servers of the same graph, over HTTP and gRPC.

    python -m benchmarks.peers [--rounds N] [--seconds S] [--only NAME ...]

Serves gpt2-small of `model_repository` on one core. `benchmarks/servers.py` starts the servers, `benchmarks/peers/`
holds their handlers, and `.venv/peers` their virtual environments. The load runs on another core: `wrk`
(https://github.com/wg/wrk, install it first) over 4 connections, or four threads of tritonclient for gRPC.

First, every answer is compared with the output of onnxruntime. Then all servers take turns in each round, shape by
shape; SIGSTOP pauses the others. The table goes to docs/reference/peers.md, unless `--only` is given. It lists servers
with a failed installation or start as "could not run".
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

DOCUMENT = Path("docs/reference/peers.md")
BEGIN, END = "<!-- written by benchmarks.peers -->\n", "<!-- end -->\n"
SLOW = 5.0
"""Cases with slower answers, in seconds, are not measured."""

EMBEDDINGS = triton.InferRequestedOutput("embeddings")

Shape = tuple[int, int]
Case = tuple[str, Shape]
"""A row and a column of the table."""


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
                except (CannotRun, RuntimeError) as error:  # no answer, or a broken connection
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
    """Compare one answer of each case with onnxruntime, and return the work to measure by case."""
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
    """Compare an answer with `truth` unless that is None, and return its seconds; infinity without an answer."""
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
    """Return `work` with a duration of at least four answers; it returns NaN if one takes longer than `SLOW`."""
    if took > SLOW:
        return lambda: math.nan
    return lambda: work(max(seconds, math.ceil(4 * took)))


def by_http(running: RunningPeer, ids: Any) -> Any:
    """Return the vectors of an HTTP answer, in `.npy`, JSON or raw bytes."""
    answer = running.ask(ids)
    if answer.startswith(b"\x93NUMPY"):
        return np.load(io.BytesIO(answer))
    size = 4 * ids.size * WIDTH
    if len(answer) > 2 * size:  # JSON
        document = orjson.loads(answer)
        return document["outputs"][0]["data"] if isinstance(document, dict) else document
    return np.frombuffer(answer[-size:], np.float32)


def infer(port: int, ids: Any) -> Any:
    """Return the vectors of a gRPC answer."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(MODEL, [tensor(ids)], outputs=[EMBEDDINGS]).as_numpy("embeddings")


def tensor(ids: Any) -> Any:
    """Return ids as an input of tritonclient."""
    return triton.InferInput("input_ids", ids.shape, "INT64").set_data_from_numpy(ids)


def grpc_rate(
    port: int, ids: Any, seconds: float, connections: int, metadata: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Return the gRPC requests per second, with one thread for each connection."""
    # tritonclient takes a dict, and gRPC metadata has lower-case names.
    headers = {name.lower(): value for name, value in metadata.items()}
    counts: list[int] = []
    ready = threading.Barrier(connections + 1, timeout=60)

    def ask() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        with triton.InferenceServerClient(f"127.0.0.1:{port}", channel_args=options) as client:
            inputs, count = [tensor(ids)], 0
            client.infer(MODEL, inputs, outputs=[EMBEDDINGS], headers=headers)
            ready.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                client.infer(MODEL, inputs, outputs=[EMBEDDINGS], headers=headers)
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
    """Return a table of the rates, and below it the reasons of missing servers."""
    lines = ["| server, protocol |" + "".join(f" {shape} |" for shape in SHAPES), "|---|" + "---|" * len(SHAPES)]
    titles = dict.fromkeys(title for title, _ in found)
    lines += [f"| {title} |" + "".join(f" {cell(found[title, shape])} |" for shape in SHAPES) for title in titles]
    for name, reason in reasons.items():
        lines.append(f"| {SERVERS[name].title} |" + " could not run |" * len(SHAPES))
        reasons[name] = f"{SERVERS[name].title}: {reason}"
    return "\n".join([*lines, *(f"\nCould not run: {reason}." for reason in reasons.values())]) + "\n"


def cell(rates: list[float]) -> str:
    """Return the median of the rounds, with the least and the greatest rate."""
    if any(map(math.isnan, rates)):
        return "-"
    middle = statistics.median(rates)
    return f"{rounded(middle)} ({rounded(min(rates))} to {rounded(max(rates))})" if len(rates) > 1 else rounded(middle)


def rounded(number: float) -> str:
    """Return a rate with three digits."""
    return f"{float(f'{number:.3g}'):,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number else "0"


def heading(options: argparse.Namespace, load: float) -> str:
    """Return a description of the measurement, the machine and the date."""
    return (
        f"Requests per second, medians of {options.rounds} rounds of {options.seconds:g} s for each case, and their "
        f"spread; {processor()}, {os.cpu_count()} virtual cores, Python {platform.python_version()}, "
        f"{datetime.date.today():%-d %B %Y}, load average {load:.1f} at the start. A dash: a "
        f"response took over {SLOW:g} s, or broke off. Each case lasts for at least four responses."
    )


def processor() -> str:
    """Return the model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write(text: str) -> None:
    """Replace the table in the document."""
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{DOCUMENT}: got no place for the table, expected {BEGIN.strip()} and {END.strip()}")
    DOCUMENT.write_text(before + BEGIN + "\n" + text + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
