"""Page-locked memory and streams of the driver of the tests, each test in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from preblock.service.runtime.providers import CPU, CUDA
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
STREAMS = """
from preblock.service.runtime.cuda_driver import load_driver
class Owner:
    pass
driver, owners = load_driver(), [Owner(), Owner()]
streams = [driver.take_stream(0, owner) for owner in owners]
del owners[0]
successor = Owner()
print(len(set(streams)), driver.take_stream(0, successor) == streams[0], driver.take_stream(0, successor) in streams)
del successor
print(driver.take_stream(1, Owner()) in streams)
"""
SESSION = """
import sys
from pathlib import Path
from preblock.service.core.errors import ArtifactError, ProviderError
from preblock.service.runtime.providers import CUDA
from preblock.service.runtime.session import Session
try:
    Session(Path(sys.argv[1]), CUDA)
except (ArtifactError, ProviderError) as error:
    print(error)
"""


def run(code: str, folder: Path, *arguments: Path, failing: str = "") -> subprocess.CompletedProcess[str]:
    known = os.environ | build_driver(folder) | {FAILURE: failing}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=known, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (POOL, "True (3, 699) 14679.0\nfull\n"),  # memory is used again, and bounded
        (COPY, "True\n"),  # to the same memory
        (STREAMS, "2 True False\nFalse\n"),  # the stream of an ended owner is used again
    ],
    ids=["pool", "copy", "streams"],
)
def test_memory_and_streams_are_used_again(tmp_path: Path, code: str, expected: str) -> None:
    done = run(code, tmp_path)
    assert done.stdout == expected, done.stderr


def test_vectors_without_pinned_memory_are_copied_anyway(tmp_path: Path) -> None:
    for failing in ("cuMemAllocHost_v2", "cuMemcpyDtoH_v2"):
        done = run(COPY, tmp_path, failing=failing)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="onnxruntime-gpu is installed")
@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("", f"onnxruntime could not start {CUDA} and took {CPU}"),
        ("cuStreamCreate", "model.onnx cannot be loaded into the GPU: CUDA_ERROR_INVALID_VALUE"),
    ],
    ids=["fallback", "no stream"],
)
def test_session_that_cannot_use_cuda_is_rejected(
    tiny_repository: Path, tmp_path: Path, failing: str, error: str
) -> None:
    done = run(SESSION, tmp_path, tiny_repository / "gpt" / "1", failing=failing)
    assert done.stdout == f"{error}\n", done.stderr
