"""Host memory that a GPU reads and writes itself: its pages are locked, and known to the driver.

Between a GPU and any other memory the driver copies by way of a locked buffer of its own: once more, and slower.
Functions are those of CUDA's driver API, section "Memory Management" (cuMemHostRegister).
"""

import ctypes
import mmap
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PORTABLE = 1
"""Known to every context of the driver (CU_MEMHOSTREGISTER_PORTABLE)."""


class Locker(Protocol):
    """Locks memory."""

    def lock(self, address: int, size: int, /) -> None:
        """Lock `size` bytes; raises OSError where that cannot be done."""

    def unlock(self, address: int, size: int, /) -> None:
        """Unlock what was locked."""


class Driver:
    """The driver of CUDA, which was started, and its first GPU.

    Raises:
        OSError: there is none.

    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        # The one that onnxruntime uses; it is kept until the process ends.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def lock(self, address: int, size: int) -> None:
        """Lock memory, in any thread."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), PORTABLE)

    def unlock(self, address: int, _: int) -> None:
        """Unlock memory, in any thread."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def _call(self, function: str, *arguments: object) -> None:
        try:
            status = self._library[function](*arguments)
        except AttributeError as error:
            raise OSError(f"{function}: this driver has no such function") from error
        if status:
            raise OSError(f"{function}: CUDA error {status}")


class _Pages(mmap.mmap):
    """Pages that are locked until they are returned."""

    _locker: Locker | None = None

    def lock(self, locker: Locker) -> None:
        """Lock them."""
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        locker.lock(self._address, len(self))
        self._locker = locker

    def __del__(self) -> None:
        if self._locker is not None:
            self._locker.unlock(self._address, len(self))


def pinned(size: int, locker: Locker) -> Bytes:
    """Return zeros, uint8 (size,), locked for as long as the array or a view of it lives.

    Raises:
        OSError: they cannot be locked.

    """
    pages = _Pages(-1, size)
    pages.lock(locker)
    return np.frombuffer(pages, np.uint8)


@cache
def driver() -> Driver:
    """Return the driver of CUDA, asked for once."""
    return Driver()


def pinned_by_cuda(size: int) -> Bytes:
    """Return memory that CUDA has locked, as `pinned` does."""
    return pinned(size, driver())
