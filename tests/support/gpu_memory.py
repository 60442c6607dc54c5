"""Memory of a client on a GPU: a real one, or the one of the driver in `tests/support/cuda_driver.c`."""

import base64
import secrets
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.paths import ROOT

HANDLE_BYTES = 64
FAILURE = "CUDA_DRIVER_FAILURE"
"""Environment variable with the name of a failing function of the tests' driver."""


class GpuMemory:
    """Memory of GPU 0, by the functions of tritonclient."""

    kind = "cuda"

    def __init__(self, size: int) -> None:
        from tritonclient.utils import cuda_shared_memory

        self._module = cuda_shared_memory
        self._size = size
        self._region = cuda_shared_memory.create_shared_memory_region("test", size, 0)
        self.handle: bytes = cuda_shared_memory.get_raw_handle(self._region)

    def fill(self, content: NDArray[Any]) -> None:
        self._module.set_shared_memory_region(self._region, [content])

    def content(self) -> bytes:
        found: NDArray[np.uint8] = self._module.get_contents_as_numpy(self._region, np.uint8, [self._size])
        return found.tobytes()

    def free(self) -> None:
        if self._region is not None:
            self._module.destroy_shared_memory_region(self._region)
            self._region = None


class StandInMemory:
    """Memory of the driver of the tests: POSIX shared memory, with its name in the handle."""

    kind = "cuda"

    def __init__(self, size: int) -> None:
        self._file = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
        self._file.write_bytes(bytes(size))
        self.handle = base64.b64encode(self._file.name.encode().ljust(HANDLE_BYTES, b"\0"))

    def fill(self, content: NDArray[Any]) -> None:
        with self._file.open("r+b") as file:
            file.write(content.tobytes())

    def content(self) -> bytes:
        return self._file.read_bytes()

    def free(self) -> None:
        self._file.unlink(missing_ok=True)


def build_driver(folder: Path) -> dict[str, str]:
    """Compile the driver of the tests in `folder`, and return the environment for servers to load it."""
    source, library = ROOT / "tests/support/cuda_driver.c", folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", source, "-o", library],
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder)}
