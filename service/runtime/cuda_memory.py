"""Memory of NVIDIA GPUs that other processes share by CUDA IPC handles, through the driver `libcuda.so.1`.

Source: NVIDIA, "CUDA Driver API": context management, memory management.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock, RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Forbidden, Invalid, Unavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""Size of `CUipcMemHandle`."""
MAX_PINNED_BYTES = 2**26
LAZY_ENABLE_PEER_ACCESS = 1
"""The only flag of `cuIpcOpenMemHandle`."""


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


Address = ctypes.c_uint64
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(Address), IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (Address,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(Address), ctypes.POINTER(ctypes.c_size_t), Address),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, Address, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (Address, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoD_v2": (Address, Address, ctypes.c_size_t),
    "cuMemAllocHost_v2": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
}
"""Types of the arguments of each function; all return `CUresult`, 0 for success."""


class DriverError(OSError):
    """A function of the driver failed; `strerror` is the name of the error, such as CUDA_ERROR_INVALID_VALUE."""


class Driver:
    """The driver, initialized.

    Raises:
        OSError: the library is missing.
        AttributeError: the library lacks a function.
        DriverError: the driver cannot be initialized, such as without a GPU.

    """

    def __init__(self) -> None:
        library = ctypes.CDLL(LIBRARY)
        self._functions = {name: getattr(library, name) for name in SIGNATURES}
        for name, arguments in SIGNATURES.items():
            self._functions[name].argtypes = arguments
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = RLock()  # garbage collection can call `close` here
        count = ctypes.c_int(0)
        self.call("cuInit", 0)
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.devices = count.value

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function; raise DriverError if it fails."""
        code = self._functions[function](*arguments)
        if code:
            name = ctypes.c_char_p()
            self._functions["cuGetErrorName"](code, ctypes.byref(name))
            raise DriverError(code, (name.value or b"an unknown error").decode())

    @contextmanager
    def use(self, device: int) -> Iterator[None]:
        """Make the primary context of a device current in this thread; onnxruntime has the same context."""
        self.call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate_pinned(self, device: int, size: int) -> NDArray[np.uint8]:
        """Return page-locked memory of this machine, uint8 (size,) without values; raise DriverError if that fails.

        A GPU copies into it several times as fast as into other memory.
        """
        address = ctypes.c_void_p()
        with self.use(device):
            self.call("cuMemAllocHost_v2", ctypes.byref(address), size)
        assert address.value is not None
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        weakref.finalize(memory, self._free_pinned, device, address.value)
        return np.ctypeslib.as_array(memory)

    def copy_to_host(self, device: int, target: int, source: int, size: int) -> None:
        """Copy bytes from the address `source` of a GPU to an address of this machine; raise DriverError on failure."""
        with self.use(device):
            self.call("cuMemcpyDtoH_v2", target, source, size)

    def _free_pinned(self, device: int, address: int) -> None:
        with suppress(DriverError), self.use(device):  # at the end of the process the driver may have ended
            self.call("cuMemFreeHost", address)

    def close(self, device: int, address: int) -> None:
        """Close a mapping of another process's memory."""
        with suppress(DriverError), self.use(device):  # at the end of the process the driver may have ended
            self.call("cuIpcCloseMemHandle", address)

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(number), device)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context
            return self._contexts[device]


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
        weakref.finalize(self, driver.close, device_id, origin)

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
        self._copy("cuMemcpyHtoD_v2", address, values.ctypes.data, values.nbytes)

    def copy(self, address: int, source: int, size: int) -> None:
        """Copy bytes from the address `source` of the same GPU; raise DriverError if that fails."""
        self._copy("cuMemcpyDtoD_v2", address, source, size)

    def _copy(self, function: str, address: int, source: int, size: int) -> None:
        with self._driver.use(self.device_id):
            self._driver.call(function, address, source, size)
            # Both copies may return before their last bytes have arrived, and another process reads them.
            self._driver.call("cuStreamSynchronize", None)


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


@cache
def load_driver() -> Driver:
    """Load the driver once.

    Raises:
        Forbidden: there is no driver, or it finds no GPU.

    """
    try:
        driver = Driver()
    except DriverError as error:
        reason = f"the NVIDIA driver finds no GPU ({error.strerror})"
    except OSError:
        reason = f"no NVIDIA driver: {LIBRARY} was not found"
    except AttributeError as error:
        reason = f"the NVIDIA driver is too old: {error}"
    else:
        if driver.devices:
            return driver
        reason = "the NVIDIA driver finds no GPU"
    message = f"CUDA shared memory cannot be used: {reason}"
    raise Forbidden("CUDA shared memory", reason, "a GPU of the server", message=message)


@cache
def has_driver() -> bool:
    """Return whether memory of other processes can be opened on a GPU of this server."""
    try:
        load_driver()
    except Forbidden:
        return False
    return True
