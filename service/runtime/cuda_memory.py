"""Memory of NVIDIA GPUs, also of other processes by CUDA IPC handles, and page-locked memory for copies.

Source: NVIDIA, "CUDA Driver API": memory management.
"""

import ctypes
import sys
import weakref
from functools import cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.names import DATA
from preblock.service.core.errors import ArtifactError, Invalid, Unavailable
from preblock.service.runtime.buffer_pool import BufferPool
from preblock.service.runtime.cuda_driver import HANDLE_BYTES, Address, Driver, DriverError, IpcHandle, load_driver

SESSION_GPU = 0
"""Number of the GPU of all sessions and kernels."""
MAX_PINNED_BYTES = 2**26
LAZY_ENABLE_PEER_ACCESS = 1
"""The only flag of `cuIpcOpenMemHandle`."""


class GpuMemory:
    """Memory of a GPU, freed with the object.

    Args:
        driver: allocates.
        device: number of the GPU.
        size: number of bytes.

    Raises:
        DriverError: the driver fails, such as for lack of memory.

    """

    def __init__(self, driver: Driver, device: int, size: int) -> None:
        self.address, self.size = driver.allocate(device, size), size
        weakref.finalize(self, driver.release, "cuMemFree_v2", device, self.address)


def check_memory_limit(size: int, limit: int | None) -> None:
    """Raise ArtifactError if tables of `size` bytes are over the setting `gpu_mem_limit_bytes`; None: no limit."""
    if limit is not None and size > limit:
        raise ArtifactError(DATA, f"{size} bytes", f"at most {limit}, by gpu_mem_limit_bytes")


class PinnedMemory:
    """Allocates page-locked memory, up to `MAX_PINNED_BYTES` in all: the system cannot use it for anything else.

    Args:
        driver: allocates.
        device: number of the GPU.

    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device, self._left, self._lock = driver, device, MAX_PINNED_BYTES, Lock()

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """Return memory, uint8 (size,); raise MemoryError over the limit, and DriverError if the driver fails."""
        with self._lock:
            if size > self._left:
                raise MemoryError
            memory = self._driver.allocate_pinned(self._device, size)
            self._left -= size
        return memory


@cache
def pinned_pool() -> BufferPool:
    """Return the page-locked memory of all sessions and kernels; it is never freed."""
    return BufferPool(PinnedMemory(load_driver(), SESSION_GPU).allocate, sys.maxsize)


class DeviceMemory:
    """Memory of a GPU, mapped from another process. The mapping exists as long as the object.

    Args:
        driver: copies the bytes.
        device_id: number of the GPU.
        origin: address of the first byte.
        size: number of bytes.

    """

    identity = "memory of GPUs"
    """All GPUs share one address space."""

    def __init__(self, driver: Driver, device_id: int, origin: int, size: int) -> None:
        self._driver, self.device_id, self.origin, self.size = driver, device_id, origin, size
        weakref.finalize(self, driver.release, "cuIpcCloseMemHandle", device_id, origin)

    def end(self) -> int:
        """Return the address after the last byte."""
        return self.origin + self.size

    def read(self, address: int, size: int) -> bytes:
        """Return a copy of bytes; raise DriverError if the driver cannot read them."""
        content = np.empty(size, np.uint8)
        self._driver.copy_to_host(self.device_id, content.ctypes.data, address, size)
        return content.tobytes()

    def write(self, address: int, content: memoryview) -> None:
        """Write bytes; raise DriverError if the driver cannot write them."""
        values = np.frombuffer(content, np.uint8)
        self._driver.copy_to_gpu("cuMemcpyHtoD_v2", self.device_id, address, values.ctypes.data, values.nbytes)

    def copy(self, address: int, source: int, size: int) -> None:
        """Copy bytes from the address `source` of the same GPU; raise DriverError if that fails."""
        self._driver.copy_to_gpu("cuMemcpyDtoD_v2", self.device_id, address, source, size)


_OPEN: "weakref.WeakValueDictionary[tuple[int, bytes], DeviceMemory]" = weakref.WeakValueDictionary()
_OPEN_LOCK = Lock()


def open_memory(handle: bytes, device_id: int, size: int) -> DeviceMemory:
    """Map memory of another process for a region of `size` bytes; handles in use are mapped once.

    Raises:
        Forbidden: the server has no driver or no GPU.
        Invalid: the handle cannot be opened, there is no such GPU, or the memory is smaller.
        Unavailable: the driver fails.

    """
    if len(handle) != HANDLE_BYTES:
        raise Invalid("raw_handle", f"{len(handle)} bytes", f"{HANDLE_BYTES} bytes, a CUDA IPC handle")
    driver = load_driver()
    if not 0 <= device_id < driver.devices:
        raise Invalid("device_id", device_id, f"0 to {driver.devices - 1}, the number of a GPU of the server")
    try:
        with _OPEN_LOCK, driver.use(device_id):
            memory = _OPEN.get((device_id, handle))
            if memory is None:
                memory = _OPEN[device_id, handle] = _map(driver, handle, device_id)
    except DriverError as error:
        message = f"GPU {device_id} cannot be used: {error.strerror}"
        raise Unavailable("device_id", device_id, "a usable GPU", message=message) from error
    if size > memory.size:
        raise Invalid("byte_size", size, f"at most {memory.size}, the bytes of the memory behind raw_handle")
    return memory


def _map(driver: Driver, handle: bytes, device_id: int) -> DeviceMemory:
    """Map memory of another process into the current context."""
    origin, base, size = Address(), Address(), ctypes.c_size_t()
    copy = IpcHandle.from_buffer_copy(handle)
    try:
        driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(origin), copy, LAZY_ENABLE_PEER_ACCESS)
    except DriverError as error:
        expected = f"a handle of memory that another process has on GPU {device_id} ({error.strerror})"
        raise Invalid("raw_handle", handle.hex(), expected) from error
    try:
        driver.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), origin)
    except DriverError:
        driver.call("cuIpcCloseMemHandle", origin)
        raise
    return DeviceMemory(driver, device_id, origin.value, base.value + size.value - origin.value)
