"""Requests of vectors in every format."""

import io
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

JSON, BYTES, NPY = "application/json", "application/octet-stream", "application/x-npy"
SAFETENSORS = "application/x-safetensors"


def embed(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    response = client.post(f"/models/{model}/embed", json=fields)
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"] == JSON
    document: dict[str, Any] = response.json()
    return document


def ask_for(client: httpx.Client, accept: str, model: str = "gpt", **fields: Any) -> httpx.Response:
    return client.post(f"/models/{model}/embed", json=fields, headers={"Accept": accept})


def npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def post_npy(client: httpx.Client, array: NDArray[Any], model: str = "gpt", **query: str) -> httpx.Response:
    headers = {"Content-Type": NPY, "Accept": NPY}
    return client.post(f"/models/{model}/embed", content=npy(array), params=query, headers=headers)
