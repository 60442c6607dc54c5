"""A driver without a GPU, failing functions of a driver, and shared memory that is off. Oracle: the same over TCP."""

import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.clients.shared_memory.shared_client import Client, clients_of
from tests.clients.shared_memory.test_cuda import GPU_WORKS, LARGE, OPTIONS, GpuClient
from tests.support.gpu_memory import FAILURE, StandInMemory, build_driver
from tests.support.servers import Server, serve

DRIVERS = [
    ("cuInit", "the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE)"),
    ("cuDeviceGetCount", "the NVIDIA driver finds no GPU"),
    pytest.param(
        "",
        "no NVIDIA driver: libcuda.so.1 was not found",
        marks=pytest.mark.skipif(GPU_WORKS, reason="CUDA works here"),
    ),
]


@pytest.mark.parametrize(("function", "reason"), DRIVERS, ids=["cuInit", "cuDeviceGetCount", "no library"])
def test_server_without_a_gpu_forbids_cuda_regions(
    tiny_repository: Path, tmp_path: Path, function: str, reason: str
) -> None:
    environment = build_driver(tmp_path) | {FAILURE: function} if function else {}
    with serve(tiny_repository, *OPTIONS, "--provider", "cpu", **environment) as server:
        for module in (tritonclient.http, tritonclient.grpc):
            with clients_of(server, module) as client:
                arguments = "new", base64.b64encode(bytes(64)), 0, 64
                status, error = client.refusal(*arguments, method="register_cuda_shared_memory")
                assert status == client.status_of(403, "PERMISSION_DENIED")
                assert error == f"CUDA shared memory cannot be used: {reason}"
        extensions = httpx.get(f"{server.address}/v2").json()["extensions"]
        assert "system_shared_memory" in extensions
        assert "cuda_shared_memory" not in extensions
        assert httpx.get(f"{server.address}/v2/cudasharedmemory/status").json() == []


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_cuda_shared_memory_is_off_by_default(tiny_server: Server, module: Any) -> None:
    message = "shared memory is off; the setting max_shared_memory_bytes of the server allows it"
    address = tiny_server.address.removeprefix("http://") if module is tritonclient.http else tiny_server.grpc
    with ExitStack() as stack:
        client = Client(module, address, stack)
        expected = client.status_of(403, "PERMISSION_DENIED"), message
        handle = base64.b64encode(bytes(64))
        assert client.refusal("x", handle, 0, 1, method="register_cuda_shared_memory") == expected
        assert client.refusal(method="unregister_cuda_shared_memory") == expected
        assert client.refusal(method="get_cuda_shared_memory_status") == expected


FAILURES = [
    ("cuDevicePrimaryCtxRetain", "GPU 0 cannot be used: an unknown error"),
    ("cuMemGetAddressRange_v2", "GPU 0 cannot be used: CUDA_ERROR_INVALID_VALUE"),
    ("cuMemcpyDtoH_v2", "inputs[0].parameters: the region ids cannot be read: CUDA_ERROR_INVALID_VALUE"),
    ("cuMemcpyHtoD_v2", "outputs[0].parameters: the region ids cannot be written: CUDA_ERROR_INVALID_VALUE"),
    ("cuIpcCloseMemHandle", ""),
]


@pytest.mark.parametrize(("function", "message"), FAILURES, ids=[function for function, _ in FAILURES])
def test_failure_of_the_driver_is_an_error_of_the_request(
    tiny_repository: Path, tmp_path: Path, function: str, message: str
) -> None:
    environment = build_driver(tmp_path) | {FAILURE: function}
    with (
        serve(tiny_repository, *OPTIONS, "--provider", "cpu", **environment) as server,
        clients_of(server, tritonclient.http) as opened,
    ):
        client = GpuClient(opened, StandInMemory)
        memory = client.allocate(LARGE)

        def use() -> None:
            client.register_cuda_shared_memory("ids", memory.handle, 0, 144)
            inputs = [client.plain_input() if "HtoD" in function else client.shared_input("ids", 48)]
            client.infer("gpt", inputs, outputs=[client.output("ids", 96, 48)])

        if message:
            with pytest.raises(InferenceServerException) as raised:
                use()
            assert (raised.value.status(), raised.value.message()) == ("503", message)
        else:
            use()
        client.unregister_cuda_shared_memory()
        assert client.over_tcp().size
