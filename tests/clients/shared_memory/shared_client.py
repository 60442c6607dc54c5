"""tritonclient with regions of shared memory: of files, and of GPUs."""

import functools
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
MODULES = tritonclient.http, tritonclient.grpc


class SystemMemory:
    """POSIX shared memory, by the functions of tritonclient."""

    kind = "system"

    def __init__(self, size: int) -> None:
        self.size, self.key = size, f"preblock-test-{secrets.token_hex(8)}"
        self._region = shared_memory.create_shared_memory_region("test", self.key, size)

    def fill(self, content: NDArray[Any]) -> None:
        shared_memory.set_shared_memory_region(self._region, [content])

    def content(self) -> bytes:
        found: NDArray[np.uint8] = shared_memory.get_contents_as_numpy(self._region, np.uint8, [self.size])
        return found.tobytes()

    def free(self) -> None:
        shared_memory.destroy_shared_memory_region(self._region)


class Client:
    """A client of tritonclient, and its regions in one kind of memory."""

    def __init__(self, module: Any, address: str, stack: ExitStack, memory: Any = SystemMemory) -> None:
        self.module, self.memory, self._stack = module, memory, stack
        self.kind = memory.kind
        self.client = stack.enter_context(module.InferenceServerClient(address))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    @property
    def http(self) -> bool:
        return self.module is tritonclient.http

    def allocate(self, size: int) -> Any:
        """Return memory that is not registered."""
        memory = self.memory(size)
        self._stack.callback(memory.free)
        return memory

    def register(self, name: str, memory: Any, size: int, **options: Any) -> None:
        self.shared("register", *self.registration(name, memory, size), **options)

    def registration(self, name: str, memory: Any, size: int) -> tuple[Any, ...]:
        return (name, memory.key, size) if self.kind == "system" else (name, memory.handle, 0, size)

    def region(self, name: str, content: NDArray[Any]) -> Any:
        """Allocate and register a region with `content`, and return its memory."""
        memory = self.allocate(content.nbytes)
        memory.fill(content)
        self.register(name, memory, content.nbytes)
        return memory

    def shared(self, action: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the kind of memory, such as `register_system_shared_memory`."""
        status = "_status" if action == "get" else ""
        return getattr(self.client, f"{action}_{self.kind}_shared_memory{status}")(*arguments, **options)

    def regions(self, name: str = "", **options: Any) -> dict[str, int]:
        """Return the sizes of registered regions by name."""
        if self.http:
            found = self.shared("get", name, **options)
        else:
            found = self.shared("get", name, as_json=True, **options).get("regions", {}).values()
        return {item["name"]: int(item["byte_size"]) for item in found}

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
        """Return status and message of the error of a call, or of an action with shared memory."""
        call = self.client.infer if method == "infer" else functools.partial(self.shared, method)
        with pytest.raises(InferenceServerException) as raised:
            call(*args, **options)
        return str(raised.value.status()), str(raised.value.message())

    def status_of(self, http: int, grpc: str) -> str:
        return str(http) if self.http else f"StatusCode.{grpc}"


@contextmanager
def clients_of(server: Server, module: Any, memory: Any = SystemMemory) -> Iterator[Client]:
    address = server.address.removeprefix("http://") if module is tritonclient.http else server.grpc
    httpx.get(f"{server.address}/readyz").raise_for_status()
    with ExitStack() as stack:
        client = Client(module, address, stack, memory)
        yield client
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
