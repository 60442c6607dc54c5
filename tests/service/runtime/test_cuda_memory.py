"""Page-locked memory through the driver of the tests, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.gpu_memory import FAILURE, build_driver
from tests.support.paths import ROOT

USE = """
import gc
from functools import partial
from preblock.service.runtime.buffer_pool import BufferPool
from preblock.service.runtime.cuda_memory import load_driver
pool = BufferPool(partial(load_driver().allocate_pinned, 0))
vectors = pool.take((3, 700))
vectors[:] = 7
address = vectors.ctypes.data
del vectors
again = pool.take((3, 699))
print(again.ctypes.data == address, again.shape, float(again.sum()))
del again, pool
gc.collect()
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = os.environ | build_driver(folder) | environment
    return subprocess.run([sys.executable, "-c", USE], env=known, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pinned_memory_is_used_again(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stdout == "True (3, 699) 14679.0\n", done.stderr


def test_pinned_memory_without_space_names_the_error(tmp_path: Path) -> None:
    done = run(tmp_path, **{FAILURE: "cuMemAllocHost_v2"})
    assert done.returncode == 1
    assert done.stderr.endswith("DriverError: [Errno 1] CUDA_ERROR_INVALID_VALUE\n")
