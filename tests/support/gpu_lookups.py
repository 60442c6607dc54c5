"""Compare the kernel for GPUs with NumPy, which multiplies, rounds, adds and rounds.

Writes a line for each comparison, "same" or "different", or an error. With the argument `refusals` it writes the errors
for indices without a row.
"""

import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import PreblockError
from preblock.service.runtime.cuda_driver import load_driver
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.cuda_memory import SESSION_GPU, GpuMemory
from preblock.service.runtime.fused_embedding import KernelTables

ROWS, POSITIONS = 300, 512
WIDTHS = (1, 3, 64, 767, 768)
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


def refusals() -> Iterator[str]:
    """Look up indices without a row; yield the errors."""
    lookup = CudaLookup(KernelTables(np.zeros((ROWS, 4), np.float32), 1.0, np.zeros((POSITIONS, 4), np.float32)))
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
    try:
        for line in refusals() if sys.argv[1:] == ["refusals"] else lookups():
            sys.stdout.write(f"{line}\n")
    except PreblockError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
