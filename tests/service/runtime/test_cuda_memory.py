"""Memory that is locked for as long as it is held. Oracle: the kernel, which counts what a process has locked.

What locks here is the C library; CUDA's driver, which does it where there is a GPU, is asked in the same way.
"""

import ctypes
import os
import re
from pathlib import Path

import numpy as np
import pytest

from preblock.service.runtime.cuda_memory import Driver, pinned
from preblock.service.runtime.session import why_no_cuda

SIZE = 2**14
LIBC = ctypes.CDLL(None, use_errno=True)


class Kernel:
    """Locks memory as the C library does."""

    def lock(self, address: int, size: int) -> None:
        if LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unlock(self, address: int, size: int) -> None:
        assert LIBC.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0


class Refusing(Kernel):
    """Locks nothing, and is asked to unlock nothing."""

    def lock(self, *_: int) -> None:
        raise OSError("not these")

    def unlock(self, *_: int) -> None:
        raise AssertionError("what was not locked")


def locked() -> int:
    (kilobytes,) = re.findall(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(kilobytes) * 1024


def test_memory_is_locked_until_the_last_view_of_it_is_gone() -> None:
    before = locked()
    memory = pinned(SIZE, Kernel())
    assert memory.tobytes() == bytes(SIZE)
    assert locked() - before == SIZE
    view = memory[64:].view(np.int64)
    del memory
    view[:] = 7
    assert (locked() - before, view.sum()) == (SIZE, 7 * len(view))
    del view
    assert locked() == before


def test_memory_that_cannot_be_locked_is_none() -> None:
    before = locked()
    with pytest.raises(OSError, match="not these"):
        pinned(SIZE, Refusing())
    assert locked() == before


@pytest.mark.skipif(why_no_cuda() is None, reason="CUDA works here")
def test_where_there_is_no_gpu_there_is_no_driver() -> None:
    with pytest.raises(OSError, match=r"cuda|CUDA"):
        Driver()


@pytest.mark.skipif(why_no_cuda() is not None, reason="needs a GPU")
def test_cuda_locks_memory() -> None:
    driver = Driver()
    memory = pinned(SIZE, driver)
    address = memory.ctypes.data
    with pytest.raises(OSError, match="cuMemHostRegister_v2: CUDA error"):
        driver.lock(address, SIZE)  # it is locked already
    del memory
    with pytest.raises(OSError, match="cuMemHostUnregister: CUDA error"):
        driver.unlock(address, SIZE)
