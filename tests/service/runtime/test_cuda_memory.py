"""Vectors in page-locked memory, through the driver of the tests, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.gpu_memory import FAILURE, build_driver
from tests.support.paths import ROOT

POOL = """
import gc, sys
from preblock.service.runtime.buffer_pool import BufferPool
from preblock.service.runtime.cuda_driver import load_driver
from preblock.service.runtime.cuda_memory import MAX_PINNED_BYTES, PinnedMemory
pinned = PinnedMemory(load_driver(), 0)
pool = BufferPool(pinned.allocate, sys.maxsize)
vectors = pool.take((3, 700))
vectors[:] = 7
address = vectors.ctypes.data
del vectors
again = pool.take((3, 699))
print(again.ctypes.data == address, again.shape, float(again.sum()))
pinned.allocate(MAX_PINNED_BYTES // 2)
try:
    pinned.allocate(MAX_PINNED_BYTES // 2)
except MemoryError:
    print("full")
del again, pool
gc.collect()
"""
COPY = """
import numpy as np
import onnxruntime as ort
from preblock.service.runtime.session import copy_to_host
expected = np.arange(2 * 300 * 64, dtype=np.float32).reshape(2, 300, 64)
addresses = []
for source in (expected, expected + 1, expected.astype(np.float16), np.zeros((0, 4), np.float32)):
    found = copy_to_host(ort.OrtValue.ortvalue_from_numpy(source))
    assert (found.dtype, found.shape, found.tobytes()) == (source.dtype, source.shape, source.tobytes())
    addresses.append(found.ctypes.data)
    del found
print(addresses[0] == addresses[1])
"""


def run(code: str, folder: Path, failing: str = "") -> subprocess.CompletedProcess[str]:
    known = os.environ | build_driver(folder) | {FAILURE: failing}
    return subprocess.run(
        [sys.executable, "-c", code], env=known, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_pinned_memory_is_used_again_and_bounded(tmp_path: Path) -> None:
    done = run(POOL, tmp_path)
    assert done.stdout == "True (3, 699) 14679.0\nfull\n", done.stderr


def test_vectors_of_a_gpu_are_copied_to_the_same_memory(tmp_path: Path) -> None:
    done = run(COPY, tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_vectors_without_pinned_memory_are_copied_anyway(tmp_path: Path) -> None:
    for failing in ("cuMemAllocHost_v2", "cuMemcpyDtoH_v2"):
        done = run(COPY, tmp_path, failing)
        assert done.returncode == 0, done.stderr
