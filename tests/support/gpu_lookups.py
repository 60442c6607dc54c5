"""Compare the kernel for GPUs with NumPy: multiply, round, add and round.

    python -m tests.support.gpu_lookups lookups|threads|refusals|limit

Writes a line for each comparison, "same" or "different", or an error.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import PreblockError
from preblock.service.runtime.cuda_driver import load_driver
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.cuda_memory import SESSION_GPU, GpuMemory
from preblock.service.runtime.fused_embedding import KernelTables

ROWS, POSITIONS = 300, 512
WIDTHS = (1, 3, 64, 767, 768)
EMPTY = KernelTables(np.zeros((ROWS, 4), np.float32), 1.0, np.zeros((POSITIONS, 4), np.float32))
SHAPES = ((1, 1), (1, 128), (3, 5), (7, 1), (8, 128), (0, 4), (2, 512))


def lookups() -> Iterator[str]:
    """Look up rows of each width and shape, with one offset and with an offset for each row."""
    random = np.random.default_rng(0)
    for width in WIDTHS:
        tables = KernelTables(
            random.standard_normal((ROWS, width), np.float32),
            float(np.float32(random.choice((1.0, 22.627417, -0.3)))),
            random.standard_normal((POSITIONS, width), np.float32),
        )
        lookup = CudaLookup(tables)
        for batch, length in SHAPES:
            for count in {1, batch} - {0}:
                ids = random.integers(0, ROWS, (batch, length))
                offset = random.integers(0, POSITIONS - length + 1, count)
                yield look_up(lookup, tables, ids, offset)


def threads() -> Iterator[str]:
    """Look up rows in four threads at a time."""
    random = np.random.default_rng(0)
    tables = KernelTables(
        random.standard_normal((ROWS, 768), np.float32), 1.0, random.standard_normal((POSITIONS, 768), np.float32)
    )
    lookup = CudaLookup(tables)
    with ThreadPoolExecutor(4) as pool:
        calls = [(random.integers(0, ROWS, (4, 64)), random.integers(0, 64, 1)) for _ in range(40)]
        yield from pool.map(lambda call: look_up(lookup, tables, *call), calls)


def limit() -> Iterator[str]:
    """Limit the memory to less than the tables."""
    yield from CudaLookup(EMPTY, EMPTY.tokens.nbytes + EMPTY.positions.nbytes - 1).run({}, [])


def refusals() -> Iterator[str]:
    """Look up indices without a row; yield the errors."""
    lookup = CudaLookup(EMPTY)
    for id_, offset in ((ROWS, 0), (-1, 0), (0, POSITIONS - 1), (0, -1)):
        try:
            lookup.run({"input_ids": np.array([[0, id_]]), "offset": np.array([offset])}, ["embeddings"])
        except IndexError as error:
            yield str(error)


def look_up(lookup: CudaLookup, tables: KernelTables, ids: NDArray[np.int64], offset: NDArray[np.int64]) -> str:
    """Compare vectors in memory of this machine, and in memory of the GPU at two alignments."""
    positions = tables.positions[offset.reshape(-1, 1) + np.arange(ids.shape[1])]
    expected = np.asarray(tables.tokens[ids] * np.float32(tables.scale) + positions, np.float32)
    feeds, driver = {"input_ids": ids, "offset": offset}, load_driver()
    found = [lookup.run(feeds, ["embeddings"])["embeddings"]]
    for begin in (0, 4):
        memory = GpuMemory(driver, SESSION_GPU, begin + expected.nbytes + 4)
        lookup.run_into(feeds, memory.address + begin)
        found.append(np.empty_like(expected))
        driver.copy_to_host(SESSION_GPU, found[-1].ctypes.data, memory.address + begin, expected.nbytes)
    same = all(vectors.shape == expected.shape and vectors.tobytes() == expected.tobytes() for vectors in found)
    return "same" if same else f"different: {ids.shape}, {len(offset)} offsets, width {expected.shape[-1]}"


def main() -> None:
    """Write the lines."""
    (kind,) = sys.argv[1:]
    try:
        for line in {"lookups": lookups, "threads": threads, "refusals": refusals, "limit": limit}[kind]():
            sys.stdout.write(f"{line}\n")
    except PreblockError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
