"""Reusable memory for vectors: a fresh page costs more than a small call."""

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

from preblock.service.runtime.runner import Float32

MIN_BYTES, MAX_BYTES = 2**12, 2**21
"""Bytes of the smallest and the largest buffer in the pool."""
MAX_FREE = 4
"""Free pageable buffers of one size; all sizes together hold 16 MiB."""
CACHE_LINE = 64
"""Bytes. A vector across two lines costs a sixth more."""

_Buffers = list[tuple[int, NDArray[np.uint8]]]
"""Aligned address, and the array with the memory."""


def _allocate(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


class BufferPool:
    """Free buffers by size; sizes are powers of two.

    Args:
        allocate: returns memory of a number of bytes, or raises an error; default: pageable memory.
        max_free: free buffers of one size that are kept; default 4.

    """

    def __init__(self, allocate: Callable[[int], NDArray[np.uint8]] = _allocate, max_free: int = MAX_FREE) -> None:
        self._allocate, self._max_free = allocate, max_free
        self._free: dict[int, _Buffers] = {}

    def take(self, shape: tuple[int, ...]) -> Float32:
        """Return an uninitialized array of `shape`; its memory returns to the pool with its last view."""
        size = max(MIN_BYTES, 1 << (4 * prod(shape) - 1).bit_length())
        free = self._free.setdefault(size, [])
        try:
            address, buffer = free.pop()
        except IndexError:
            buffer = self._allocate(size + CACHE_LINE)
            address = -(-buffer.ctypes.data // CACHE_LINE) * CACHE_LINE
        return np.asarray(_Lease(free, self._max_free if size <= MAX_BYTES else 0, address, buffer, shape))


class _Lease:
    """Owns a buffer as long as a NumPy array uses it."""

    __slots__ = ("__array_interface__", "_address", "_buffer", "_free", "_most")

    def __init__(
        self, free: _Buffers, most: int, address: int, buffer: NDArray[np.uint8], shape: tuple[int, ...]
    ) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<f4", "version": 3}
        self._free, self._most, self._address, self._buffer = free, most, address, buffer

    def __del__(self) -> None:
        if len(self._free) < self._most:
            self._free.append((self._address, self._buffer))
