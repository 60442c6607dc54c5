"""The fused kernel on a GPU. Oracle: NumPy; see tests/support/gpu_lookups.py.

A process loads only one driver, so each test has a process of its own. With the driver of the tests, a function in C
stands for the kernel.
"""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from preblock.service.runtime.cuda_embedding import KERNELS, PTX
from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.support.gpu_lookups import SHAPES, WIDTHS
from tests.support.gpu_memory import FAILURE, build_driver
from tests.support.nvrtc import HEAD, SOURCE

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
