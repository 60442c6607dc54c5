"""tritonclient with regions of shared memory."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support.servers import Server

IDS = np.array([[1, 2, 3], [4, 5, 6]])
MAX_BYTES = 2**24


class Client:
    """A client of tritonclient, and its regions."""

    def __init__(self, module: Any, address: str, stack: ExitStack) -> None:
        self.module, self.stack = module, stack
        self.client = stack.enter_context(module.InferenceServerClient(address))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    @property
    def http(self) -> bool:
        return self.module is tritonclient.http

    def create(self, name: str, size: int) -> Any:
        """Create shared memory of `size` bytes for the region `name`, without registering it."""
        handle = shared_memory.create_shared_memory_region(name, f"preblock-test-{secrets.token_hex(8)}", size)
        self.stack.callback(shared_memory.destroy_shared_memory_region, handle)
        return handle

    def region(self, name: str, content: NDArray[Any]) -> Any:
        """Create and register a region with `content`."""
        handle = self.create(name, content.nbytes)
        shared_memory.set_shared_memory_region(handle, [content])
        self.client.register_system_shared_memory(name, handle._shm_key, content.nbytes)
        return handle

    def shared_input(self, region: str, size: int, shape: Any = IDS.shape, offset: int = 0, **options: str) -> Any:
        named = {"name": "input_ids", "datatype": "INT64"} | options
        tensor = self.module.InferInput(named["name"], list(shape), named["datatype"])
        return tensor.set_shared_memory(region, size, offset)

    def plain_input(self, ids: NDArray[np.int64] = IDS) -> Any:
        return self.module.InferInput("input_ids", list(ids.shape), "INT64").set_data_from_numpy(ids)

    def output(self, region: str, size: int, offset: int = 0, name: str = "embeddings") -> Any:
        output = self.module.InferRequestedOutput(name)
        output.set_shared_memory(region, size, offset)
        return output

    def over_tcp(self, ids: NDArray[np.int64] = IDS, model: str = "gpt", **options: Any) -> NDArray[Any]:
        outputs = [self.module.InferRequestedOutput("embeddings")]
        answer = self.client.infer(model, [self.plain_input(ids)], outputs=outputs, **options)
        vectors: NDArray[Any] = answer.as_numpy("embeddings")
        return vectors

    def refusal(self, *args: Any, method: str = "infer", **options: Any) -> tuple[str, str]:
        """Return status and message of the error of a call."""
        with pytest.raises(InferenceServerException) as raised:
            getattr(self.client, method)(*args, **options)
        return str(raised.value.status()), str(raised.value.message())

    def status_of(self, http: int, grpc: str) -> str:
        return str(http) if self.http else f"StatusCode.{grpc}"


@contextmanager
def clients_of(server: Server, module: Any) -> Iterator[Client]:
    address = server.address.removeprefix("http://") if module is tritonclient.http else server.grpc
    httpx.get(f"{server.address}/readyz").raise_for_status()
    with ExitStack() as stack:
        client = Client(module, address, stack)
        yield client
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
