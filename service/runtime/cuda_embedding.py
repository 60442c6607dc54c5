"""Sum of token rows and position rows on an NVIDIA GPU, by `_fused_embedding.cu`, bit-identical to the graph.

onnxruntime needs two or three operators, and each writes all vectors.

Letters: B batch, L length, P width.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.names import DATA, EMBEDDINGS
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.runtime.buffer_pool import MAX_BYTES
from preblock.service.runtime.cuda_driver import DriverError, load_driver
from preblock.service.runtime.cuda_memory import SESSION_GPU, GpuMemory, check_memory_limit, pinned_pool
from preblock.service.runtime.fused_embedding import KernelTables
from preblock.service.runtime.runner import Feeds, Float32

PTX = Path(__file__).with_name("_fused_embedding.ptx")
THREADS_PER_BLOCK = 64
"""A block computes one vector."""
KERNELS = {4: "add_rows_by_4", 1: "add_rows"}
"""Kernels by the number of values that a thread reads at once."""
MIN_INDEX_BYTES = 2**20
"""Size of the first memory for ids and offsets: enough for 65,536 tokens, so that few requests need more."""


class CudaLookup:
    """Computes `embeddings` on the GPU.

    Args:
        tables: of the model; a copy of them is in GPU memory as long as the object exists.
        gpu_mem_limit_bytes: limit of that copy; default None: no limit.

    Raises:
        ArtifactError: the tables are over the limit, the GPU has no memory for them, or it cannot load the kernel.

    """

    def __init__(self, tables: KernelTables, gpu_mem_limit_bytes: int | None = None) -> None:
        check_memory_limit(tables.tokens.nbytes + tables.positions.nbytes, gpu_mem_limit_bytes)
        self._rows, self._width = tables.tokens.shape
        self._max_len, self._scale = len(tables.positions), tables.scale
        self._driver = load_driver()
        self._lock = Lock()
        try:
            self._kernels = load_kernels()
            self._tokens, self._positions = (_copy_to_gpu(table) for table in (tables.tokens, tables.positions))
            self._indices = GpuMemory(self._driver, SESSION_GPU, MIN_INDEX_BYTES)
        except DriverError as error:
            message = f"{DATA} or the kernel cannot be loaded into the GPU: {error.strerror}"
            raise ArtifactError(DATA, error.strerror, "a GPU with free memory", message=message) from error

    def run(self, feeds: Feeds, outputs: Sequence[str]) -> dict[str, Float32]:
        """Return `outputs`, `embeddings` alone, (B, L, P); up to 2 MiB of them are in page-locked memory.

        Raises:
            IndexError: an id or a position has no row.
            Unavailable: the driver fails, such as for lack of memory.

        """
        (name,) = outputs
        shape = (*feeds["input_ids"].shape, self._width)
        size = 4 * feeds["input_ids"].size * self._width
        if 0 < size <= MAX_BYTES:
            with suppress(DriverError, MemoryError):  # without page-locked memory, as for more vectors
                vectors = pinned_pool().take(shape)
                self._compute(feeds, vectors.ctypes.data)
                return {name: vectors}
        vectors = np.empty(shape, np.float32)
        with _named_errors():
            if size:
                memory = GpuMemory(self._driver, SESSION_GPU, size)
                self._compute(feeds, memory.address)
                self._driver.copy_to_host(SESSION_GPU, vectors.ctypes.data, memory.address, size)
        return {name: vectors}

    def run_into(self, feeds: Feeds, address: int) -> None:
        """Write `embeddings` (B, L, P) to an address of the GPU, a multiple of 4, and wait.

        Raises:
            IndexError: an id or a position has no row.
            Unavailable: the driver fails, such as for lack of memory.

        """
        with _named_errors():
            self._compute(feeds, address)

    def _compute(self, feeds: Feeds, address: int) -> None:
        """Do as `run_into`, or raise DriverError. The address may be of page-locked memory, too."""
        ids, offset = (np.ascontiguousarray(feeds[key], np.int64) for key in ("input_ids", "offset"))
        _check(ids, self._rows, "id")
        _check(offset, self._max_len - ids.shape[1] + 1, "offset")
        with self._lock, self._driver.use(SESSION_GPU):
            if (needed := ids.nbytes + offset.nbytes) > self._indices.size:
                self._indices = GpuMemory(self._driver, SESSION_GPU, 1 << (needed - 1).bit_length())
            self._driver.call("cuMemcpyHtoD_v2", self._indices.address, ids.ctypes.data, ids.nbytes)
            offsets = self._indices.address + ids.nbytes
            self._driver.call("cuMemcpyHtoD_v2", offsets, offset.ctypes.data, offset.nbytes)
            if ids.size:
                self.launch(self._indices.address, ids.shape, offsets, len(offset), address)
            self._driver.call("cuStreamSynchronize", None)

    def launch(self, ids: int, shape: tuple[int, ...], offsets: int, offset_count: int, address: int) -> None:
        """Start the kernel in the current context, without waiting for it.

        Args:
            ids: address of the ids (B, L), int64.
            shape: B and L, at least 1.
            offsets: address of the offsets, int64.
            offset_count: number of offsets, 1 or B.
            address: of the vectors.

        Raises:
            DriverError: the driver fails.

        """
        # A thread reads several values at once if the rows allow it.
        count = next(count for count in KERNELS if self._width % count == 0 and address % (4 * count) == 0)
        self._driver.launch(
            self._kernels[count],
            shape[0] * shape[1],
            THREADS_PER_BLOCK,
            ctypes.c_uint64(ids),
            ctypes.c_uint32(shape[1]),
            ctypes.c_uint64(offsets),
            ctypes.c_uint32(offset_count > 1),
            ctypes.c_uint64(self._tokens.address),
            ctypes.c_float(self._scale),
            ctypes.c_uint64(self._positions.address),
            ctypes.c_uint32(self._width // count),
            ctypes.c_uint64(address),
        )


@contextmanager
def _named_errors() -> Iterator[None]:
    """Raise Unavailable in place of DriverError."""
    try:
        yield
    except DriverError as error:
        message = f"the GPU cannot compute {EMBEDDINGS}: {error.strerror}"
        cause = error.with_traceback(None)  # since Python 3.12 its frames hold the error: a cycle, with the memory
        raise Unavailable("provider", error.strerror, "a working GPU with free memory", message=message) from cause


@cache
def load_kernels() -> dict[int, ctypes.c_void_p]:
    """Compile `KERNELS` for the GPU, once in a process; raise DriverError if that fails."""
    kernels = load_driver().load_kernels(SESSION_GPU, PTX.read_bytes(), KERNELS.values())
    return dict(zip(KERNELS, kernels, strict=True))


def _check(values: NDArray[np.int64], most: int, name: str) -> None:
    """Compare int64 values with the number of legal ones: a GPU would read other memory."""
    if values.size and (found := int(values.view(np.uint64).max())) >= most:  # negative values are the largest
        got = int(np.uint64(found).astype(np.int64))
        raise IndexError(f"{name}: got {got}, expected 0 to {most - 1}")


def _copy_to_gpu(table: NDArray[np.float32]) -> GpuMemory:
    driver = load_driver()
    memory = GpuMemory(driver, SESSION_GPU, table.nbytes)
    driver.copy_to_gpu("cuMemcpyHtoD_v2", SESSION_GPU, memory.address, table.ctypes.data, table.nbytes)
    return memory
