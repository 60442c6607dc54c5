"""The four clients of tritonclient behind one interface."""

import asyncio
import gc
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

IDS = [[1, 2, 3], [4, 5, 6]]
FIELDS = {"input_ids": IDS, "offset": [1, 2], "token_type_ids": [[0, 1, 0], [1, 0, 1]]}


class TritonClient:
    """A client of tritonclient, with or without coroutines."""

    def __init__(self, module: ModuleType, address: str) -> None:
        self.module, self._address = module, address

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method to open a client, call it and close it again."""

        async def call_aio(*args: Any, **options: Any) -> Any:
            async with self.module.InferenceServerClient(self._address) as client:
                return await getattr(client, method)(*args, **options)

        def call(*args: Any, **options: Any) -> Any:
            if self.module is tritonclient.http.aio:
                # It leaves bodies unread where the status is all it asks for: aiohttp warns when they are collected.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Unclosed connection", ResourceWarning)
                    answer = asyncio.run(call_aio(*args, **options))
                    gc.collect()
                return answer
            if self.module.__name__.endswith("aio"):
                return asyncio.run(call_aio(*args, **options))
            with self.module.InferenceServerClient(self._address) as client:
                return getattr(client, method)(*args, **options)

        return call

    @property
    def http(self) -> bool:
        return "http" in self.module.__name__

    def inputs(self, **fields: Any) -> list[Any]:
        tensors = []
        for name, value in fields.items():
            array = np.array(value, np.int64)
            tensors.append(self.module.InferInput(name, list(array.shape), "INT64"))
            tensors[-1].set_data_from_numpy(array)
        return tensors

    def document(self, method: str, *args: Any, **options: Any) -> Any:
        """Return the answer of `method` as a document, numbers of 64 bits as numbers."""
        found = getattr(self, method)(*args, **options | ({} if self.http else {"as_json": True}))
        return found if self.http else numbers(found)


def numbers(value: Any) -> Any:
    """Convert the 64-bit numbers of protobuf's JSON from strings to numbers."""
    if isinstance(value, dict):
        keep = ("name", "version", "versions")
        return {key: child if key in keep else numbers(child) for key, child in value.items()}
    if isinstance(value, list):
        return [numbers(child) for child in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
