"""The driver of NVIDIA GPUs, `libcuda.so.1`.

Source: NVIDIA, "CUDA Driver API": contexts, memory, modules, streams, and execution control.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Forbidden

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""Size of `CUipcMemHandle`."""
NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream."""


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
    "cuMemAlloc_v2": (ctypes.POINTER(Address), ctypes.c_size_t),
    "cuMemFree_v2": (Address,),
    "cuMemAllocHost_v2": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuStreamCreate": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuModuleLoadData": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p),
    "cuLaunchKernel": (
        *(ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p),
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
    ),
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
        self._free_streams: defaultdict[int, list[int]] = defaultdict(list)
        self._lock = RLock()  # garbage collection can call `release` here
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
        weakref.finalize(memory, self.release, "cuMemFreeHost", device, address.value)
        return np.ctypeslib.as_array(memory)

    def copy_to_gpu(self, function: str, device: int, target: int, source: int, size: int) -> None:
        """Copy bytes to an address of a GPU by a function of the driver; raise DriverError on failure.

        The functions may return before the last bytes have arrived, and this one waits for them.
        """
        with self.use(device):
            self.call(function, target, source, size)
            self.call("cuStreamSynchronize", None)

    def copy_to_host(self, device: int, target: int, source: int, size: int) -> None:
        """Copy bytes from the address `source` of a GPU to an address of this machine; raise DriverError on failure."""
        with self.use(device):
            self.call("cuMemcpyDtoH_v2", target, source, size)

    def allocate(self, device: int, size: int) -> int:
        """Return the address of new memory of a GPU; raise DriverError if that fails."""
        address = Address()
        with self.use(device):
            self.call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def release(self, function: str, device: int, address: int) -> None:
        """Free memory, or close a mapping of another process's memory, by a function of the driver."""
        with suppress(DriverError), self.use(device):  # at the end of the process the driver may have ended
            self.call(function, address)

    def take_stream(self, device: int, owner: object) -> int:
        """Return the handle of a stream for `owner`; raise DriverError on failure.

        After its end the stream is free for another owner. It is never destroyed: onnxruntime closes a session later.
        """
        free = self._free_streams[device]
        try:
            handle = free.pop()
        except IndexError:
            stream = ctypes.c_void_p()
            with self.use(device):
                self.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
            assert stream.value is not None
            handle = stream.value
        weakref.finalize(owner, free.append, handle)
        return handle

    def load_kernels(self, device: int, ptx: bytes, names: Iterable[str]) -> list[ctypes.c_void_p]:
        """Compile PTX for a GPU, and return its kernels by these names; raise DriverError if that fails."""
        module, kernels = ctypes.c_void_p(), []
        with self.use(device):
            self.call("cuModuleLoadData", ctypes.byref(module), ptx)
            for name in names:
                kernels.append(ctypes.c_void_p())
                self.call("cuModuleGetFunction", ctypes.byref(kernels[-1]), module, name.encode())
        return kernels

    def launch(self, kernel: ctypes.c_void_p, blocks: int, threads: int, *arguments: Any) -> None:
        """Start a kernel in the current context, without waiting for it; `arguments` are ctypes values in its order."""
        pointers = [ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments]
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        self.call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, None, array, None)

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(number), device)
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context
            return self._contexts[device]


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
