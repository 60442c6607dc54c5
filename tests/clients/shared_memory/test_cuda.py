"""Tensors in memory of a GPU, through tritonclient. Oracle: the same request over TCP.

Each test runs with the driver of the tests, and with an NVIDIA GPU where there is one.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray

from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.clients.shared_memory.shared_client import IDS, MAX_BYTES, Client, clients_of
from tests.support.artifacts import copy_artifact
from tests.support.gpu_memory import GpuMemory, StandInMemory, build_driver
from tests.support.servers import Server, serve

GPU_WORKS = cuda_unavailable_reason() is None
GPU = pytest.param(
    GpuMemory, marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU_WORKS, reason="CUDA does not work here")], id="gpu"
)
OPTIONS = "--max-shared-memory-bytes", str(MAX_BYTES)
LARGE = 2**22
"""Bytes of memory that no GPU allocates together with other memory."""


class GpuClient:
    """A client with memory of a GPU."""

    def __init__(self, client: Client, memory: Any) -> None:
        self._client, self._memory = client, memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def allocate(self, size: int) -> Any:
        memory = self._memory(size)
        self.stack.callback(memory.free)
        return memory

    def gpu_region(self, name: str, content: NDArray[Any]) -> Any:
        """Allocate and register a region with `content`."""
        memory = self.allocate(content.nbytes)
        memory.fill(content)
        self.client.register_cuda_shared_memory(name, memory.handle, 0, content.nbytes)
        return memory

    def regions(self, name: str = "") -> dict[str, tuple[int, int]]:
        if self.http:
            found = self.client.get_cuda_shared_memory_status(name)
        else:
            found = self.client.get_cuda_shared_memory_status(name, as_json=True).get("regions", {}).values()
        return {item["name"]: (int(item.get("device_id", 0)), int(item["byte_size"])) for item in found}


@pytest.fixture(scope="module", params=[pytest.param(StandInMemory, id="driver"), GPU])
def memory(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def gpu_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory, memory: Any) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("gpu")
    for model in tiny_repository.iterdir():
        (root / model.name).symlink_to(model)
    copy_artifact("gpt-50x768x700", root, "wide")
    provider, environment = "cuda", dict[str, str]()
    if memory is StandInMemory:
        provider, environment = "cpu", build_driver(tmp_path_factory.mktemp("driver"))
    with serve(root, *OPTIONS, "--provider", provider, **environment) as server:
        yield server


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def client(request: pytest.FixtureRequest, gpu_server: Server, memory: Any) -> Iterator[GpuClient]:
    with clients_of(gpu_server, request.param) as opened:
        yield GpuClient(opened, memory)


def test_status_lists_gpu_regions_until_unregistered(client: GpuClient) -> None:
    first, second = client.allocate(LARGE), client.allocate(64)
    client.register_cuda_shared_memory("first", first.handle, 0, 32)
    client.register_cuda_shared_memory("second", second.handle, 0, 64)
    client.register_cuda_shared_memory("again", first.handle, 0, LARGE)
    client.region("file", IDS)
    assert client.regions() == {"first": (0, 32), "second": (0, 64), "again": (0, LARGE)}
    assert client.regions("first") == {"first": (0, 32)}
    client.unregister_cuda_shared_memory("first")
    client.unregister_cuda_shared_memory("first")  # as in Triton
    client.unregister_cuda_shared_memory("file")
    client.unregister_system_shared_memory("again")
    assert client.regions().keys() == {"second", "again"}
    status, message = client.refusal("file", method="get_cuda_shared_memory_status")
    assert status == client.status_of(404, "NOT_FOUND")
    assert message == "name: got file, expected the name of a registered region"
    _, message = client.refusal("file", first.handle, 0, 32, method="register_cuda_shared_memory")
    assert message == "the region file is registered already; unregister it first"
    client.unregister_cuda_shared_memory()
    assert client.regions() == {}
    assert client.infer("gpt", [client.shared_input("file", IDS.nbytes)]).as_numpy("embeddings").size


def test_gpu_tensors_have_the_bits_of_tcp(client: GpuClient) -> None:
    expected = client.over_tcp()
    client.gpu_region("ids", IDS)
    target = client.gpu_region("vectors", np.zeros(expected.size + 2, np.float32))
    output = client.output("vectors", expected.nbytes + 4, 4)
    for _ in range(2):
        answer = client.infer("gpt", [client.shared_input("ids", IDS.nbytes)], outputs=[output])
        assert target.content() == bytes(4) + expected.tobytes() + bytes(4)
        target.fill(np.zeros(expected.size + 2, np.float32))
    described = answer.get_output("embeddings")
    if client.http:
        parameters = {"shared_memory_region": "vectors", "shared_memory_offset": 4}
        assert described["parameters"] == parameters | {"shared_memory_byte_size": expected.nbytes}
    else:
        assert described.parameters["shared_memory_region"].string_param == "vectors"


def test_region_registered_twice_survives_one_removal(client: GpuClient) -> None:
    target = client.gpu_region("ids", IDS)
    client.register_cuda_shared_memory("again", target.handle, 0, IDS.nbytes)
    client.unregister_cuda_shared_memory("ids")
    answer = client.infer("gpt", [client.shared_input("again", IDS.nbytes)])
    assert answer.as_numpy("embeddings").tobytes() == client.over_tcp().tobytes()
    client.unregister_cuda_shared_memory("again")
    client.register_cuda_shared_memory("ids", target.handle, 0, IDS.nbytes)  # the mapping was closed and opens again
    assert client.infer("gpt", [client.shared_input("ids", IDS.nbytes)]).as_numpy("embeddings").size


def test_unregistered_gpu_memory_is_unmapped(client: GpuClient, gpu_server: Server, memory: Any) -> None:
    if memory is not StandInMemory:
        pytest.skip("only the driver of the tests maps a file")
    file = base64.b64decode(client.gpu_region("ids", IDS).handle).rstrip(b"\0").decode()
    maps = Path(f"/proc/{gpu_server.pid}/maps")
    assert file in maps.read_text()
    client.unregister_cuda_shared_memory("ids")
    assert file not in maps.read_text()


def test_inputs_and_outputs_share_one_gpu_region(client: GpuClient) -> None:
    expected, size = client.over_tcp(), client.over_tcp().nbytes
    content = np.zeros(IDS.nbytes + size + 16, np.uint8)
    content[: IDS.nbytes] = IDS.reshape(-1).view(np.uint8)
    target = client.gpu_region("all", content)
    outputs = [client.output("all", 16, IDS.nbytes + size, "lengths"), client.output("all", size, IDS.nbytes)]
    client.infer("gpt", [client.shared_input("all", IDS.nbytes)], outputs=outputs)
    assert target.content() == IDS.tobytes() + expected.tobytes() + np.array([3, 3]).tobytes()
    overlap = [client.output("all", size), client.output("all", 16, size - 1, "lengths")]
    _, message = client.refusal("gpt", [client.plain_input()], outputs=overlap)
    assert message == "outputs[1].parameters: got the same bytes for embeddings and lengths, expected separate bytes"


def test_ids_outside_the_vocabulary_are_rejected(client: GpuClient) -> None:
    client.gpu_region("ids", np.array([[1, -1, 7]]))
    status, message = client.refusal("gpt", [client.shared_input("ids", 24, (1, 3))])
    assert status == client.status_of(400, "INVALID_ARGUMENT")
    assert message == "input_ids[0][1]: got -1, expected 0 to 6"


@pytest.mark.parametrize(("dtype", "offset"), [("FP32", 0), ("FP32", 4), ("FP16", 2)])
def test_large_gpu_output_has_the_bits_of_tcp(client: GpuClient, dtype: str, offset: int) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (4, 600))
    expected = client.over_tcp(ids, "wide", parameters={"dtype": dtype})
    target = client.gpu_region("vectors", np.zeros(offset + expected.nbytes + 4, np.uint8))
    outputs = [client.output("vectors", expected.nbytes, offset)]
    client.infer("wide", [client.plain_input(ids)], outputs=outputs, parameters={"dtype": dtype})
    assert target.content() == bytes(offset) + expected.tobytes() + bytes(4)


def test_pooled_output_in_gpu_memory_has_the_bits_of_tcp(client: GpuClient) -> None:
    expected = client.over_tcp(parameters={"pooling": "mean"})
    target = client.gpu_region("vectors", np.zeros_like(expected))
    outputs = [client.output("vectors", expected.nbytes)]
    client.infer("gpt", [client.plain_input()], outputs=outputs, parameters={"pooling": "mean"})
    assert target.content() == expected.tobytes()


def test_too_small_range_is_rejected(client: GpuClient) -> None:
    size = client.over_tcp().nbytes
    client.gpu_region("vectors", np.zeros(size, np.uint8))
    invalid = client.status_of(400, "INVALID_ARGUMENT")
    outputs = [client.output("vectors", size - 1)]
    status, error = client.refusal("gpt", [client.plain_input()], outputs=outputs)
    assert status == invalid
    assert error.endswith(f"got {size - 1}, expected at least {size}, the bytes of the output embeddings")
    outputs = [client.output("vectors", size, 1)]
    status, error = client.refusal("gpt", [client.plain_input()], outputs=outputs)
    assert status == invalid
    assert error.endswith(f"got {size + 1}, expected at most {size}, the bytes of the region vectors")


def test_region_over_the_allocation_is_rejected(client: GpuClient) -> None:
    memory = client.allocate(LARGE)
    status, error = client.refusal("new", memory.handle, 0, 2 * LARGE, method="register_cuda_shared_memory")
    assert status == client.status_of(400, "INVALID_ARGUMENT")
    assert error == f"byte_size: got {2 * LARGE}, expected at most {LARGE}, the bytes of the memory behind raw_handle"
    assert client.regions() == {}


def test_handle_of_freed_memory_is_rejected(client: GpuClient) -> None:
    memory = client.allocate(LARGE)
    memory.free()
    status, error = client.refusal("new", memory.handle, 0, 64, method="register_cuda_shared_memory")
    assert status == client.status_of(400, "INVALID_ARGUMENT")
    assert error.startswith(f"raw_handle: got {base64.b64decode(memory.handle).hex()[:80]}…, expected a handle of ")
    assert "CUDA_ERROR_" in error
    assert client.over_tcp().size


REGISTRATIONS: list[tuple[dict[str, Any], str]] = [
    ({"raw_handle": base64.b64encode(bytes(63))}, "raw_handle: got 63 bytes, expected 64 bytes, a CUDA IPC handle"),
    ({"raw_handle": base64.b64encode(b"\xff" * 64)}, f"raw_handle: got {'ff' * 40}…, expected a handle of memory that"),
    ({"device_id": -1}, "device_id: got -1, expected 0 to "),
    ({"device_id": 99}, "device_id: got 99, expected 0 to "),
    ({"byte_size": 0}, "byte_size: got 0, expected 1 or more"),
    ({"name": "n" * 129}, "expected 1 to 128 bytes without a slash"),
]


@pytest.mark.parametrize(("fields", "message"), REGISTRATIONS, ids=[str(case[0])[:30] for case in REGISTRATIONS])
def test_bad_gpu_registration_is_rejected(client: GpuClient, fields: dict[str, Any], message: str) -> None:
    options = {"name": "new", "raw_handle": client.allocate(64).handle, "device_id": 0, "byte_size": 64} | fields
    status, error = client.refusal(**options, method="register_cuda_shared_memory")
    assert status == client.status_of(400, "INVALID_ARGUMENT")
    assert message in error
    assert client.over_tcp().size


def test_gpu_regions_count_for_the_limit_of_bytes(client: GpuClient) -> None:
    memory = client.allocate(64)
    status, error = client.refusal("new", memory.handle, 0, MAX_BYTES + 1, method="register_cuda_shared_memory")
    assert status == client.status_of(413, "RESOURCE_EXHAUSTED")
    client.create("file", MAX_BYTES)
    key = client.create("file", MAX_BYTES)._shm_key
    client.register_system_shared_memory("file", key, MAX_BYTES - 63)
    status, error = client.refusal("new", memory.handle, 0, 64, method="register_cuda_shared_memory")
    assert status == client.status_of(503, "UNAVAILABLE")
    assert error.startswith(f"byte_size: got 64 bytes beside {MAX_BYTES - 63}, expected at most {MAX_BYTES} bytes")


def test_cuda_extension_is_listed_with_a_driver(client: GpuClient) -> None:
    metadata = client.get_server_metadata(**({} if client.http else {"as_json": True}))
    assert {"system_shared_memory", "cuda_shared_memory"} <= set(metadata["extensions"])


BODIES = [
    ("{}", 'raw_handle: got nothing, expected an object {"b64": text in base64}'),
    ('{"raw_handle": "AAAA"}', 'raw_handle: got AAAA, expected an object {"b64": text in base64}'),
    ('{"raw_handle": {"b64": "AA"}}', "raw_handle.b64: got AA, expected base64 with padding"),
    ('{"raw_handle": {"b64": 1}}', "raw_handle: got {'b64': 1}, expected an object {\"b64\": text in base64}"),
    ('{"raw_handle": {"b64": "", "x": 1}}', "raw_handle: got {'b64': '', 'x': 1}, expected an object"),
    ('{"raw_handle": {"b64": "A$"}}', "raw_handle.b64: got A$, expected base64"),
    ('{"raw_handle": {"b64": ""}, "device_id": "0"}', "device_id: got '0', expected a 64-bit integer"),
    ('{"offset": 1}', "unknown field offset; expected raw_handle, device_id, byte_size"),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=[body for body, _ in BODIES])
def test_bad_gpu_body_is_rejected(gpu_server: Server, body: str, message: str) -> None:
    answer = httpx.post(f"{gpu_server.address}/v2/cudasharedmemory/region/x/register", content=body)
    assert (answer.status_code, message in answer.json()["error"]) == (400, True), answer.text
