"""Rows of a large n-gram table: a decode step, a warm and a cold gather, and resident memory below a budget.

    python -m benchmarks.ngram_rows [--gigabytes 8] [--cold-gigabytes 30] [--folder .]

Needs gcc, gpt2-small in `model_repository`, and room for the table in the folder; it removes the table. Steps of
gpt2-small and of the table are sent in turn over WebSockets. Row ids are computed, but replaced by random ones.
References in C: a loop over the mapped rows, and pread() of rows. The figures go to standard output as Markdown. Exits
with 1 if a floor is missed.
"""

import argparse
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import preblock
from preblock.service.app import create_app
from preblock.service.artifacts.manifest import Graph, NgramTable, TablePart, Tensor
from preblock.service.artifacts.names import NGRAM_IDS_GRAPH, NGRAM_ROW_IDS, NGRAMS, NGRAMS_GRAPH, STORED_NGRAMS
from preblock.service.core.auth import NOBODY, Principal
from preblock.service.core.settings import Settings
from preblock.service.runtime.model import ServedModel, TokenModel
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.ngram_rows import StoredRows, open_ngram_rows
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.runner import Feeds, Runner
from preblock.service.runtime.table_memory import PAGE_BYTES, TableMemory, read_file_pages
from preblock.service.server.run import configure
from tests.support.artifacts import copy_artifact
from tests.support.engines import open_engine
from tests.support.paths import ROOT
from tests.support.servers import live_server

WIDTH, HEADS = 80, 18
ROW_BYTES = 2 * WIDTH
ROUNDS, STEPS, BATCH, COLD_ROWS, BUDGETED_ROWS = 7, 2000, 65536, 5000, 10_000_000
BUDGET = 2**30
MOST_STEP, LEAST_SPEED, MOST_PAGES = 1.5, 0.7, 1.1
"""Floors: ratio of the step, ratios of both gathers, and ratio of the file pages to `BUDGET`."""
LOOPS = f"""
#include <string.h>
#include <unistd.h>
void copy(const char *table, const long *ids, long count, char *out)
{{
    for (long i = 0; i < count; i++)
        memcpy(out + i * {ROW_BYTES}, table + ids[i] * {ROW_BYTES}, {ROW_BYTES});
}}
void read_rows(int file, const long *ids, long count, char *out)
{{
    for (long i = 0; i < count; i++)
        if (pread(file, out + i * {ROW_BYTES}, {ROW_BYTES}, ids[i] * {ROW_BYTES}) < 0)
            return;
}}
"""
Int64 = NDArray[np.int64]


class RandomIds:
    """Computes the row ids of a model, and returns others, (B, L, 1, HEADS).

    For many tokens they cover all pages; for one token they are random.
    """

    def __init__(self, runner: Runner, rows: int) -> None:
        self._runner, self._rows, self._calls = runner, rows, 0
        self._random = np.random.default_rng(1).integers(0, rows, (STEPS, 1, 1, 1, HEADS))

    def run(self, feeds: Feeds, outputs: Sequence[str], /) -> dict[str, NDArray[Any]]:
        """Return the ids under their name."""
        tokens = feeds["input_ids"].size
        if tokens > 1:
            ids = np.linspace(0, self._rows - 1, tokens * HEADS).astype(np.int64)
            return {NGRAM_ROW_IDS: ids.reshape(*feeds["input_ids"].shape, 1, HEADS)}
        self._runner.run(feeds, outputs)
        self._calls += 1
        return {NGRAM_ROW_IDS: self._random[self._calls % STEPS]}


def main() -> None:
    """Measure, print a table, and compare with the floors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--cold-gigabytes", type=float, default=30)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        table = Path(folder) / "table"
        loops, rows = compile_loops(Path(folder)), int(options.gigabytes * 1e9) // ROW_BYTES
        cold, gain = measure_cold(table, write_table(table, options.cold_gigabytes), loops)
        os.truncate(table, rows * ROW_BYTES)
        for _ in open_chunks(table):  # fills the page cache
            pass
        warm = measure_warm(table, rows, loops)
        step = measure_step(table, rows, Path(folder))
        peak, row_seconds = measure_budget(table, rows)
    gigabytes, cold_gigabytes = f"{options.gigabytes:g} GB", f"{options.cold_gigabytes:g} GB"
    step_floor, speed_floor, pages_floor = f"at most {MOST_STEP}", f"at least {LEAST_SPEED}", f"at most {MOST_PAGES}"
    print("| measurement | result | floor |\n|---|---|---|")
    print(
        f"| decode step of {HEADS} rows of {ROW_BYTES} bytes, over one of gpt2-small, p50 | {step:.2f} | {step_floor} |"
    )
    print(f"| {BATCH:,} random rows of {gigabytes}, warm: speed over a loop in C | {warm:.2f} | {speed_floor} |")
    print(f"| {COLD_ROWS:,} random rows of {cold_gigabytes}, cold: speed over pread() | {cold:.2f} | {speed_floor} |")
    print(f"| the same rows after a warm-up: speed over cold ones | {gain:.0f} | |")
    print(f"| file pages after {BUDGETED_ROWS:,} random rows, over a budget of 1 GiB | {peak:.2f} | {pages_floor} |")
    print(f"| time of a random row below this budget | {row_seconds * 1e6:.1f} us | |")
    if step > MOST_STEP or min(warm, cold) < LEAST_SPEED or peak > MOST_PAGES:
        sys.exit(1)


def write_table(file: Path, gigabytes: float) -> int:
    """Write random rows, and return their number."""
    generator, rows = np.random.Generator(np.random.SFC64(0)), int(gigabytes * 1e9) // ROW_BYTES
    with file.open("wb") as stream:
        for begin in range(0, rows, 400_000):
            stream.write(generator.bytes(ROW_BYTES * min(400_000, rows - begin)))
        os.fsync(stream.fileno())
    return rows


def open_chunks(file: Path) -> Any:
    """Yield the content of a file in chunks."""
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(2**24):
            yield chunk


def compile_loops(folder: Path) -> ctypes.CDLL:
    """Compile the references."""
    (folder / "loops.c").write_text(LOOPS)
    subprocess.run(["gcc", "-O3", "-shared", "-fPIC", folder / "loops.c", "-o", folder / "loops.so"], check=True)
    return ctypes.CDLL(str(folder / "loops.so"))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of `work`."""
    begin = perf_counter()
    work()
    return perf_counter() - begin


def open_table(table: Path, budget: int | None = None) -> tuple[StoredRows, memoryview]:
    """Map the table, and return its rows and its bytes."""
    memory = TableMemory(budget)
    mapped = memory.map(table)
    return StoredRows([[mapped]], np.dtype(np.uint8), ROW_BYTES, memory), mapped


def measure_warm(table: Path, rows: int, loops: ctypes.CDLL) -> float:
    """Return the speed of the gather over the loop in C, both over pages in the page table, in one thread."""
    stored, mapped = open_table(table)
    address, random = np.frombuffer(mapped, np.uint8).ctypes.data, np.random.default_rng(2)
    stored.gather(np.arange(0, rows, PAGE_BYTES // ROW_BYTES).reshape(-1, 1, 1))  # fills the page table
    ratios = []
    for _ in range(ROUNDS):
        first, second = (random.integers(0, rows, (BATCH, 1, 1)) for _ in range(2))
        ours = timed(lambda ids=first: stored.gather(ids))  # type: ignore[misc]
        theirs = timed(lambda ids=second: call(loops.copy, ctypes.c_void_p(address), ids))  # type: ignore[misc]
        ratios.append(theirs / ours)
    return statistics.median(ratios)


def measure_cold(table: Path, rows: int, loops: ctypes.CDLL) -> tuple[float, float]:
    """Return the speed of the gather over pread(), both from the disk, and of the same gather again over the first."""
    random, ratios, gains = np.random.default_rng(3), [], []
    file = os.open(table, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    for _ in range(ROUNDS):
        first, second = (random.integers(0, rows, (COLD_ROWS, 1, 1)) for _ in range(2))
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        stored, mapped = open_table(table)
        ours, again = (timed(lambda ids=first, stored=stored: stored.gather(ids)) for _ in range(2))  # type: ignore[misc]
        gains.append(ours / again)
        del stored, mapped  # mapped pages stay in the page cache
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        ratios.append(timed(lambda ids=second: call(loops.read_rows, file, ids)) / ours)  # type: ignore[misc]
    os.close(file)
    return statistics.median(ratios), statistics.median(gains)


def call(function: Any, source: Any, ids: Int64) -> None:
    """Call a reference in C, with new memory for its rows."""
    out = np.empty((ids.size, ROW_BYTES), np.uint8)
    function(source, ctypes.c_void_p(ids.ctypes.data), ctypes.c_long(ids.size), ctypes.c_void_p(out.ctypes.data))


class LargeTable(Repository):
    """A repository with a large table in the model `ngrams`.

    Args:
        root: folder of the models.
        table: file of the rows.
        rows: their number.

    """

    def __init__(self, root: Path, table: Path, rows: int) -> None:
        super().__init__(root)
        self.model = with_table(super().get("ngrams"), table, rows)
        pages = rows * ROW_BYTES // PAGE_BYTES
        self.model.run({"input_ids": np.zeros((1, pages // HEADS), np.int64)}, (STORED_NGRAMS,))  # fills the page table

    def find(self, name: str, version: str | None = None, caller: Principal = NOBODY) -> ServedModel:
        """Return a model."""
        return self.model if name == "ngrams" and hasattr(self, "model") else super().find(name, version, caller)


def serve_table(root: Path, table: Path, rows: int, ready: Connection) -> None:
    """Serve gpt2-small and the table until the other end of `ready` is closed; send the port first."""
    settings = Settings(repository=root)
    with (
        open_engine(LargeTable(root, table, rows)) as engine,
        live_server(configure(settings, create_app(settings, engine))) as port,
    ):
        ready.send(port)
        with suppress(EOFError):
            ready.recv()


def measure_step(table: Path, rows: int, folder: Path) -> float:
    """Return the median time of a step with rows of the table over that of gpt2-small, in turn over WebSockets."""
    root, seconds = folder / "repository", {"gpt2-small": [0.0], "ngrams": [0.0]}
    copy_artifact("ngrams", root)
    (root / "gpt2-small").symlink_to((ROOT / "model_repository" / "gpt2-small").resolve())
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_table, args=(root, table, rows, theirs))
    server.start()
    with preblock.connect(f"http://127.0.0.1:{ours.recv()}") as client:
        for _ in range(STEPS // 1000):  # the offset of gpt2-small ends at 1,024
            with (
                client.decode("gpt2-small") as gpt2,
                client.decode("ngrams", output=NGRAMS, dtype="stored") as ngrams,
            ):
                for _ in range(1000):
                    for name, stream in (("gpt2-small", gpt2), ("ngrams", ngrams)):
                        seconds[name].append(timed(lambda stream=stream: stream.step([7])))  # type: ignore[misc]
    ours.send(None)
    server.join()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(", ".join(f"{name} {1e6 * found:.0f} us" for name, found in medians.items()), file=sys.stderr)
    return medians["ngrams"] / medians["gpt2-small"]


def with_table(model: TokenModel, table: Path, rows: int) -> TokenModel:
    """Return a model with one layer of n-gram embeddings from the table."""
    outputs = (Tensor(name=NGRAM_ROW_IDS, dtype="int64", shape=("batch", "length", 1, HEADS)),)
    graphs = {name: graph for name, graph in model.manifest.graphs.items() if name != NGRAMS_GRAPH}
    graphs[NGRAM_IDS_GRAPH] = Graph(inputs=graphs[NGRAM_IDS_GRAPH].inputs, outputs=outputs)
    part = TablePart(file=str(table), begin=0, rows=rows)
    place = NgramTable(rows=rows, width=WIDTH, dtype="bfloat16", parts=(part,))
    manifest = model.manifest.model_copy(update={"graphs": graphs, "ngram_tables": (place,)})
    ids = RandomIds(open_ngram_ids(model.manifest, model.sessions[NGRAM_IDS_GRAPH]), rows)
    rows_of_table = open_ngram_rows(table.parent, manifest, ids, TableMemory(), {})
    return replace(model, manifest=manifest, ngrams=rows_of_table)


def measure_budget(table: Path, rows: int) -> tuple[float, float]:
    """Return the most growth of resident file pages over the budget, and the seconds of a row."""
    before, peak, random = read_file_pages(), 0, np.random.default_rng(4)
    stored, _ = open_table(table, BUDGET)
    begin, done = perf_counter(), 0
    while done < BUDGETED_ROWS:
        ids = random.integers(0, rows, (50, 1, HEADS))
        stored.gather(ids)
        done += ids.size
        peak = max(peak, read_file_pages() - before)
    return peak / BUDGET, (perf_counter() - begin) / done


if __name__ == "__main__":
    main()
