"""Time of calls on the CPU, in the plain graph and in the service, against a memcpy of the same vectors.

    python -m benchmarks.cpu [--rounds N]

Three front-ends of width 768 with random tables and 8,192 positions: learned positions, sinusoids with scaled tokens,
and BERT. The candidates run in random order in every round; the figures are medians. Exits with 1 if a floor is missed.
N is at least 5, the default; use more on a busy machine.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings, TransformerEmbedding
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import EMBEDDINGS, GRAPH
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import CHUNK_VALUES, TokenModel
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import SLOW_ON_CPU
from tests.support.weights import seeded_

WIDTH, POSITIONS = 768, 8192
FRONT_ENDS: dict[str, Callable[[], FrontEnd]] = {
    "learned": lambda: GPT2Embeddings(50257, WIDTH, POSITIONS),
    "sinusoidal": lambda: TransformerEmbedding(50257, WIDTH, POSITIONS),
    "bert": lambda: BertEmbeddings(30522, WIDTH, POSITIONS),
}
SHAPES = ((1, 1), (1, 128), (8, 128), (32, 512), (1, 8192))
RAGGED = {"ragged, 8 rows": (8, 128), "ragged, 32 rows": (32, 512)}
"""Ragged batches: number of rows, and their longest length; lengths are random from 1."""
FLOORS = {
    ("learned", 1): 3.2,
    ("learned", 2): 2.3,
    ("sinusoidal", 1): 3.2,
    ("sinusoidal", 2): 2.3,
    ("bert", 1): 6.5,
    ("bert", 2): 5.0,
}
"""Largest ratio to the memcpy at (32, 512), by front-end and threads."""
MOST_OVERHEAD = 1.2
"""Largest ratio to a bare run() of the plain graph at (1, 1)."""
LEAST_SECONDS = 0.002
"""Least duration of a sample; shorter calls are repeated in it."""
PAUSE = 0.002
"""Seconds before a sample."""

SAMPLES, CALLS = 400, 50
"""For the smallest call: number of samples, and of calls in each."""
Feeds = dict[str, NDArray[np.int64]]
Work = Callable[[], object]


def main() -> None:
    """Measure, print a line for each call, and exit with 1 if a floor is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = max(5, parser.parse_args().rounds)
    missed = []
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} as it begins; medians of {rounds} rounds")
    print("| front-end | call | threads | memcpy us | plain | as served | as served / plain |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, build in FRONT_ENDS.items():
            frontend = build()
            seeded_(frontend, 0)
            export_loaded(LoadedSource(frontend.data(), Source(kind="module")), name, root)
        for threads in (1, 2):
            repository = Repository(root, ModelLoader(threads=threads))
            for name in FRONT_ENDS:
                missed += measure(repository.get(name), root / name / "1", threads, rounds)
    print(*missed or ["every floor is held"], sep="\n")
    sys.exit(bool(missed))


def measure(model: TokenModel, folder: Path, threads: int, rounds: int) -> list[str]:
    """Print the figures of `model`, and return the messages of the missed floors."""
    bare = open_bare(folder / GRAPH, threads)
    missed = []
    for call, feeds in calls(model).items():
        wanted = {node.name: feeds[node.name] for node in bare.get_inputs()}
        vectors = bare.run([EMBEDDINGS], wanted)[0]
        assert np.array_equal(model.run(feeds, (EMBEDDINGS,))[EMBEDDINGS], vectors)
        target = np.empty_like(vectors)
        copy, plain, served = medians(
            {
                "memcpy": partial(np.copyto, target, vectors),
                "plain": partial(bare.run, [EMBEDDINGS], wanted),
                "served": partial(serve, model, feeds),
            },
            rounds,
        ).values()
        print(
            f"| {model.name} | {call} | {threads} | {copy * 1e6:.1f} | {plain / copy:.2f} | {served / copy:.2f} "
            f"| {served / plain:.2f} |",
            flush=True,
        )
        floor = FLOORS[model.name, threads]
        if call == "(32, 512)" and served > floor * copy:
            missed.append(f"missed: {model.name} {call}, {threads} threads: {served / copy:.2f}, at most {floor}")
        if call == "(1, 1)":
            ratio = overhead(partial(bare.run, [EMBEDDINGS], wanted), partial(model.run, feeds, (EMBEDDINGS,)))
            print(
                f"{model.name} {call}, {threads} threads: {ratio:.2f} x plain, by many short samples", file=sys.stderr
            )
            if ratio > MOST_OVERHEAD:
                missed.append(
                    f"missed: {model.name} {call}, {threads} threads: {ratio:.2f} x plain, at most {MOST_OVERHEAD}"
                )
    return missed


def serve(model: TokenModel, feeds: Feeds) -> None:
    """Compute the vectors like the engine, large outputs in chunks."""
    if feeds["input_ids"].size * WIDTH <= CHUNK_VALUES:
        model.run(feeds, (EMBEDDINGS,))
        return
    for _ in model.run_in_chunks(feeds, EMBEDDINGS, CHUNK_VALUES // WIDTH):
        pass


def calls(model: TokenModel) -> dict[str, Feeds]:
    """Return the feeds of every call, by title."""
    generator = np.random.default_rng(0)
    found: dict[str, Feeds] = {}
    for shape in SHAPES:
        found[str(shape)] = feeds_of(model, shape, np.zeros(1, np.int64), generator)
    for name, (rows, longest) in RAGGED.items():
        lengths = generator.integers(1, longest + 1, rows)
        offsets = np.concatenate([np.arange(length) for length in lengths])
        found[f"{name}, {len(offsets)} tokens"] = feeds_of(model, (len(offsets), 1), offsets, generator)
    return found


def feeds_of(
    model: TokenModel, shape: tuple[int, int], offset: NDArray[np.int64], generator: np.random.Generator
) -> Feeds:
    """Return random ids and indices of `shape` at `offset`."""
    limits = {"input_ids": model.manifest.vocab_size, **model.manifest.indices}
    return {name: generator.integers(0, limit, shape) for name, limit in limits.items()} | {"offset": offset}


def open_bare(graph: Path, threads: int) -> Any:
    """Return a plain onnxruntime session of `graph`, with the options of the service."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph, options, providers=[CPU], disabled_optimizers=SLOW_ON_CPU)


def medians(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Return the median seconds of each work over `rounds` rounds. Each runs once before it is timed."""
    times = dict[str, int]()
    for name, work in works.items():
        work()
        times[name] = max(1, int(LEAST_SECONDS / seconds(work, 1)))
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in shuffled(list(works)):
            time.sleep(PAUSE)
            works[name]()
            found[name].append(seconds(works[name], times[name]))
    return {name: statistics.median(samples) for name, samples in found.items()}


def overhead(plain: Work, served: Work) -> float:
    """Return the median ratio of `served` to `plain` over short samples, taken in turn.

    Longer samples would hide a difference of a few microseconds in twenty.
    """
    return statistics.median(seconds(served, CALLS) / seconds(plain, CALLS) for _ in range(SAMPLES))


def seconds(work: Work, times: int) -> float:
    """Return the mean seconds of `times` calls of `work`."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times


def shuffled(names: Sequence[str]) -> list[str]:
    """Return `names` in random order."""
    return random.sample(names, len(names))


if __name__ == "__main__":
    main()
