"""Servers with shared memory of files and of GPUs, and tritonclient over each protocol.

The driver of the tests stands for a GPU, and an NVIDIA GPU is used where there is one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.clients.shared_memory.shared_client import MAX_BYTES, MODULES, Client, SystemMemory, clients_of
from tests.support.artifacts import make_repository
from tests.support.gpu_memory import GpuMemory, StandInMemory, build_driver
from tests.support.servers import Server, serve
from tests.support.shared import Shared

OPTIONS = "--max-shared-memory-bytes", str(MAX_BYTES), "--provider"
GPU_WORKS = cuda_unavailable_reason() is None
GPU = pytest.param(
    GpuMemory, marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU_WORKS, reason="CUDA does not work here")], id="gpu"
)


@pytest.fixture(scope="package")
def memory_repository(shared: Shared) -> Path:
    return shared.make("memory", lambda root: make_repository(root, bert="bert", gpt="gpt", wide="gpt-50x768x700"))


@pytest.fixture(scope="package")
def driver_server(memory_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(memory_repository, *OPTIONS, "cpu", **build_driver(tmp_path_factory.mktemp("driver"))) as server:
        yield server


@pytest.fixture(scope="package")
def gpu_server(memory_repository: Path) -> Iterator[Server]:
    with serve(memory_repository, *OPTIONS, "cuda") as server:
        yield server


@pytest.fixture(params=[SystemMemory, pytest.param(StandInMemory, id="driver"), GPU])
def memory(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def region_server(request: pytest.FixtureRequest, memory: Any) -> Server:
    server: Server = request.getfixturevalue("gpu_server" if memory is GpuMemory else "driver_server")
    return server


@pytest.fixture(params=MODULES, ids=["http", "grpc"])
def memory_client(request: pytest.FixtureRequest, region_server: Server, memory: Any) -> Iterator[Client]:
    with clients_of(region_server, request.param, memory) as opened:
        yield opened


in_files = pytest.mark.parametrize("memory", [SystemMemory], indirect=True)
on_gpus = pytest.mark.parametrize("memory", [pytest.param(StandInMemory, id="driver"), GPU], indirect=True)
