"""Failing functions of the driver of GPUs. Oracle: the same request over TCP."""

import base64
from pathlib import Path

import httpx
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.clients.shared_memory.conftest import GPU_WORKS, OPTIONS
from tests.clients.shared_memory.shared_client import MODULES, clients_of
from tests.clients.shared_memory.test_regions import LARGE
from tests.support.gpu_memory import FAILURE, StandInMemory, build_driver
from tests.support.servers import serve

REASONS = {
    "cuInit": "the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE)",
    "cuDeviceGetCount": "the NVIDIA driver finds no GPU",
    "no library": "no NVIDIA driver: libcuda.so.1 was not found",
}


@pytest.mark.parametrize("failure", REASONS)
def test_server_without_a_gpu_forbids_cuda_regions(tiny_repository: Path, tmp_path: Path, failure: str) -> None:
    if failure == "no library" and GPU_WORKS:
        pytest.skip("CUDA works here")
    environment = {} if failure == "no library" else build_driver(tmp_path) | {FAILURE: failure}
    with serve(tiny_repository, *OPTIONS, "cpu", **environment) as server:
        for module in MODULES:
            with clients_of(server, module, StandInMemory) as client:
                status, error = client.refusal("new", base64.b64encode(bytes(64)), 0, 64, method="register")
                assert status == client.status_of(403, "PERMISSION_DENIED")
                assert error == f"CUDA shared memory cannot be used: {REASONS[failure]}"
        extensions = httpx.get(f"{server.address}/v2").json()["extensions"]
        assert ("system_shared_memory" in extensions, "cuda_shared_memory" in extensions) == (True, False)
        assert httpx.get(f"{server.address}/v2/cudasharedmemory/status").json() == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cuDevicePrimaryCtxRetain", "GPU 0 cannot be used: an unknown error"),
        ("cuMemGetAddressRange_v2", "GPU 0 cannot be used: CUDA_ERROR_INVALID_VALUE"),
        ("cuMemcpyDtoH_v2", "inputs[0].parameters: the region ids cannot be read: CUDA_ERROR_INVALID_VALUE"),
        ("cuMemcpyHtoD_v2", "outputs[0].parameters: the region ids cannot be written: CUDA_ERROR_INVALID_VALUE"),
        ("cuIpcCloseMemHandle", ""),
    ],
)
def test_failure_of_the_driver_is_an_error_of_the_request(
    tiny_repository: Path, tmp_path: Path, function: str, message: str
) -> None:
    with (
        serve(tiny_repository, *OPTIONS, "cpu", **build_driver(tmp_path), **{FAILURE: function}) as server,
        clients_of(server, tritonclient.http, StandInMemory) as client,
    ):
        memory = client.allocate(LARGE)

        def use() -> None:
            client.register("ids", memory, 144)
            inputs = [client.plain_input() if "HtoD" in function else client.shared_input("ids", 48)]
            client.infer("gpt", inputs, outputs=[client.output("ids", 96, 48)])

        if message:
            with pytest.raises(InferenceServerException) as raised:
                use()
            assert (raised.value.status(), raised.value.message()) == ("503", message)
        else:
            use()
        client.shared("unregister")
        assert client.over_tcp().size
