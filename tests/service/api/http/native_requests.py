"""Requests of the native API in every media type."""

import base64
import io
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.late import safetensors_torch, torch

JSON, BYTES, NPY = "application/json", "application/octet-stream", "application/x-npy"
SAFETENSORS = "application/x-safetensors"
IDS = [[1, 2, 3], [4, 5, 6]]
RAGGED = [[1, 2, 3], [4], [5, 6]]
Vectors = NDArray[np.float32]


def post(client: httpx.Client, model: str, kind: str, body: bytes, accept: str = "*/*", **query: str) -> httpx.Response:
    headers = {"Content-Type": kind, "Accept": accept}
    return client.post(f"/models/{model}/embed", content=body, params=query, headers=headers)


def post_json(client: httpx.Client, model: str, accept: str = "*/*", **fields: Any) -> httpx.Response:
    return client.post(f"/models/{model}/embed", json=fields, headers={"Accept": accept})


def ask(client: httpx.Client, model: str, accept: str = JSON, **fields: Any) -> httpx.Response:
    response = post_json(client, model, accept, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == accept
    return response


def told(client: httpx.Client, model: str, **fields: Any) -> Any:
    """Return the answer in JSON."""
    return ask(client, model, **fields).json()


def encode(vectors: Vectors) -> str:
    return base64.b64encode(vectors.astype("<f4").tobytes()).decode()


def vectors_of(answer: Any, output: str = "embeddings") -> Vectors:
    """Return the vectors of an answer in JSON, in its shape."""
    found = {"data": answer[output], **answer} if output in answer else answer["outputs"][output]
    return np.frombuffer(base64.b64decode(found["data"]), "<f4").reshape(found["shape"])


def ask_tensors(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = safetensors_torch.load(ask(client, model, SAFETENSORS, **fields).content)
    return tensors


def octets(tensor: Any) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["detail"]


def prompt_of(text: str) -> Any:
    """Load a prompt as vLLM does."""
    tensor = torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True, map_location="cpu")
    assert isinstance(tensor, torch.Tensor)
    return tensor
