"""Sum of token rows and position rows in one pass, by `_fused_embedding.c`, bit-identical to the graph.

onnxruntime needs two operators, and the second reads the output of the first again.

Letters: V vocabulary, M max_len, P width, B batch, L length.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from preblock.service.artifacts.manifest import Kernel, Manifest
from preblock.service.artifacts.names import DATA, EMBEDDINGS, MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.buffer_pool import MAX_BYTES, BufferPool
from preblock.service.runtime.runner import Feeds, Float32, Runner

try:
    from preblock.service.runtime._kernels import add_rows, guard_files
except ImportError:  # installed without a C compiler
    BUILT = False
else:
    BUILT = True


class KernelTables(NamedTuple):
    """Views of the data file: token rows (V, P), the factor of each, and the rows of all positions (M, P)."""

    tokens: Float32
    scale: float
    positions: Float32


def map_tables(folder: Path, manifest: Manifest, kernel: Kernel) -> KernelTables:
    """Map the kernel's tables of the manifest.

    Raises:
        ArtifactError: the data file does not hold them, or they do not fit the model.

    """
    tokens, field = kernel.tokens, f"{MANIFEST} kernel.tokens"
    room = (manifest.files[DATA].bytes - tokens.begin) // (4 * tokens.width)
    if not manifest.vocab_size <= tokens.rows <= room:
        raise ArtifactError(f"{field}.rows", tokens.rows, f"{manifest.vocab_size} to {room}")
    if tokens.width != manifest.width:
        raise ArtifactError(f"{field}.width", tokens.width, f"{manifest.width}, the width of embeddings")
    for name, begin in (("tokens", tokens.begin), ("positions", kernel.positions.begin)):
        if begin % 4:
            raise ArtifactError(f"{MANIFEST} kernel.{name}.begin", begin, "a multiple of 4")
    rows = np.memmap(folder / DATA, np.float32, "r", tokens.begin, (tokens.rows, tokens.width)).view(np.ndarray)
    return KernelTables(rows, tokens.scale, _map_positions(folder, manifest, kernel))


def _map_positions(folder: Path, manifest: Manifest, kernel: Kernel) -> Float32:
    """Map the rows of all positions, (M, P)."""
    if manifest.max_len is None:
        raise ArtifactError(f"{MANIFEST} max_len", None, "a number, since there are kernel.positions")
    table, width = kernel.positions, kernel.tokens.width
    room = (manifest.files[DATA].bytes - table.begin) // (4 * width)
    if table.rows > room or table.first + manifest.max_len > table.rows:
        allowed = f"{table.first + manifest.max_len} to {room}"
        raise ArtifactError(f"{MANIFEST} kernel.positions.rows", table.rows, allowed)
    begin = table.begin + table.first * 4 * width
    return np.memmap(folder / DATA, np.float32, "r", begin, (manifest.max_len, width)).view(np.ndarray)


class FusedLookup:
    """Runs `embeddings` in the kernel, and all other calls on another runner.

    Args:
        tables: of the model.
        other: runs large calls without the buffer pool, and all other offsets.

    """

    def __init__(self, tables: KernelTables, other: Runner) -> None:
        self._tables, self._other = tables, other
        self._pool = BufferPool()
        self._max_tokens = MAX_BYTES // (4 * tables.positions.shape[1])

    def run(self, feeds: Feeds, outputs: Sequence[str]) -> dict[str, Float32]:
        """Return `outputs`: `embeddings` alone.

        Raises:
            IndexError: an id has no row.

        """
        batch, length = feeds["input_ids"].shape
        if not 0 < batch * length <= self._max_tokens or not covers(feeds):
            return self._other.run(feeds, outputs)
        vectors = self._pool.take((batch, length, self._tables.positions.shape[1]))
        self.run_into(feeds, vectors)
        return {EMBEDDINGS: vectors}

    def run_into(self, feeds: Feeds, vectors: Float32) -> None:
        """Write the embeddings of covered feeds into `vectors`, (B, L, P) and contiguous.

        Raises:
            IndexError: an id has no row.
            BufferError: `vectors` is a mapped file that has become shorter, after a call of `guard_mapped_files`.

        """
        ids, offset = feeds["input_ids"], feeds["offset"]
        tokens, scale, table = self._tables
        if len(offset) == 1:
            begin = offset.item()
            positions = table[begin : begin + ids.shape[1]]
        else:
            positions = table.take(offset, 0)
        add_rows(np.ascontiguousarray(ids), tokens, scale, positions, vectors, table.shape[1])


def covers(feeds: Feeds) -> bool:
    """Return whether the kernel covers these feeds: one offset for all rows, or rows of one token."""
    return len(feeds["offset"]) == 1 or feeds["input_ids"].shape[1] == 1


def guard_mapped_files() -> None:
    """Make the kernels raise BufferError, in place of a fatal SIGBUS, if a mapped output or table becomes shorter."""
    guard_files()
