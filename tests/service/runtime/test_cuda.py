"""The kernel, page-locked memory and streams on a GPU. Oracle: NumPy; see tests/support/gpu_lookups.py.

A process loads only one driver, so each test has a process of its own. With the driver of the tests, a function in C
stands for the kernel.
"""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import onnxruntime
import pytest

from preblock.service.runtime.cuda_embedding import KERNELS, PTX
from preblock.service.runtime.providers import CPU, CUDA, cuda_unavailable_reason
from tests.support.gpu_lookups import SHAPES, WIDTHS
from tests.support.gpu_memory import FAILURE, build_driver
from tests.support.nvrtc import HEAD, SOURCE
from tests.support.paths import ROOT

GPU_WORKS = cuda_unavailable_reason() is None
GPU = pytest.param(
    True, marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU_WORKS, reason="CUDA does not work here")], id="gpu"
)


def lookups(environment: dict[str, str], kind: str = "lookups") -> list[str]:
    command = [sys.executable, "-m", "tests.support.gpu_lookups", kind]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_ptx_is_made_of_the_source() -> None:
    text = PTX.read_text()
    assert text.startswith(HEAD.format(sha256(SOURCE.read_bytes()).hexdigest())), "run `make ptx`"
    assert all(f".visible .entry {name}(" in text for name in KERNELS.values())


@pytest.mark.parametrize("real", [pytest.param(False, id="driver"), GPU])
def test_kernel_on_a_gpu_has_the_bits_of_numpy(tmp_path: Path, real: bool) -> None:
    offsets = sum(len({1, batch} - {0}) for batch, _ in SHAPES)
    assert lookups({} if real else build_driver(tmp_path)) == ["same"] * len(WIDTHS) * offsets


def test_kernel_works_without_page_locked_memory(tmp_path: Path) -> None:
    assert set(lookups(build_driver(tmp_path) | {FAILURE: "cuMemAllocHost_v2"})) == {"same"}


@pytest.mark.parametrize("real", [pytest.param(False, id="driver"), GPU])
def test_concurrent_calls_of_the_kernel_keep_their_ids(tmp_path: Path, real: bool) -> None:
    assert lookups({} if real else build_driver(tmp_path), "threads") == ["same"] * 40


REFUSALS = {
    "limit": ["model.onnx.data: got 12992 bytes, expected at most 12991, by gpu_mem_limit_bytes"],
    "refusals": [
        "id: got 300, expected 0 to 299",
        "id: got -1, expected 0 to 299",
        "offset: got 511, expected 0 to 510",
        "offset: got -1, expected 0 to 510",
    ],
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_tables_over_a_limit_and_bad_indices_are_rejected(tmp_path: Path, kind: str) -> None:
    assert lookups(build_driver(tmp_path), kind) == REFUSALS[kind]


FAILURES = [
    ("cuLaunchKernel", "the GPU cannot compute embeddings: CUDA_ERROR_INVALID_VALUE"),
    ("cuMemAlloc_v2", "model.onnx.data or the kernel cannot be loaded into the GPU: CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuModuleLoadData", "model.onnx.data or the kernel cannot be loaded into the GPU: CUDA_ERROR_INVALID_VALUE"),
]


@pytest.mark.parametrize(("failing", "error"), FAILURES, ids=[failing for failing, _ in FAILURES])
def test_failure_of_the_gpu_is_named(tmp_path: Path, failing: str, error: str) -> None:
    assert lookups(build_driver(tmp_path) | {FAILURE: failing}) == [error]


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
