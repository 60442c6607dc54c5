"""Vectors left on a GPU. Oracle: the same vectors in memory of the server.

A process loads only one driver, so each test has a process of its own. The tests with a real GPU are in
tests/clients/shared_memory/test_regions.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.support.artifacts import copy_artifact
from tests.support.gpu_memory import FAILURE, build_driver
from tests.support.gpu_outputs import STAND_IN

pytestmark = pytest.mark.skipif(
    STAND_IN not in onnxruntime.get_available_providers(), reason="onnxruntime's package for GPUs lacks it"
)

ROWS = [",".join(["100"] * 90), "4100,4100,4100", "3,4000,1,4999,17", ",".join(["1000"] * 60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for model in ("gpt", "roberta", "bert"):
        copy_artifact(f"{model}-300x64x5000", folder / model, model)
    return folder


def write(root: Path, folder: Path, model: str, device_id: int, failing: str, offset: int = 4) -> list[str]:
    environment = os.environ | build_driver(folder) | {FAILURE: failing}
    arguments = (str(root / model), model, str(device_id), str(offset), *ROWS)
    command = [sys.executable, "-m", "tests.support.gpu_outputs", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


DIRECT, COPY = "cuMemcpyHtoD_v2", "cuMemcpyDtoD_v2"
SAME = ["same"] * len(ROWS)
LOST = "outputs[0].parameters: the region vectors cannot be written: CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize(
    ("model", "failing", "device_id", "offset", "expected"),
    [
        ("gpt", COPY, 0, 4, SAME),  # the kernel writes into the client's memory
        ("bert", DIRECT, 0, 4, SAME),  # onnxruntime's vectors are copied there within the GPU only
        ("gpt", COPY, 0, 2, SAME),  # unaligned vectors are copied
        ("gpt", COPY, 1, 4, SAME),  # and vectors for another GPU
        ("roberta", COPY, 0, 4, [LOST] * len(ROWS)),
    ],
)
def test_vectors_on_a_gpu_have_the_same_bits(
    root: Path, tmp_path: Path, model: str, failing: str, device_id: int, offset: int, expected: list[str]
) -> None:
    assert write(root, tmp_path, model, device_id, failing, offset) == expected


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("cuStreamCreate", "token.onnx cannot be loaded into the GPU: CUDA_ERROR_INVALID_VALUE"),
        ("cuLaunchKernel", "manifest.json kernel: the GPU cannot compute embeddings: CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_model_that_the_gpu_cannot_run_is_not_loaded(root: Path, tmp_path: Path, failing: str, error: str) -> None:
    assert write(root, tmp_path, "gpt", 0, failing) == [f"gpt/1/{error}"]
