"""Requests of the Open Inference Protocol over HTTP."""

import json
from typing import Any

import httpx
import numpy as np

from tests.support.protocols import ITEM_FIELDS, Vectors

HEADER_LENGTH = "Inference-Header-Content-Length"
IDS = [[1, 2, 3], [4, 5, 6]]


def tensor(name: Any = "input_ids", data: Any = IDS, **more: Any) -> dict[str, Any]:
    """Return an input with JSON data."""
    shape = more["shape"] if "shape" in more else np.array(data).shape
    return {"name": name, "datatype": "INT64", "data": data} | more | {"shape": shape}


def declared(array: Any, name: str = "input_ids", **more: Any) -> dict[str, Any]:
    """Return an input whose data are bytes after the JSON."""
    size = np.array(array, "<i8").nbytes
    return {"name": name, "datatype": "INT64", "shape": np.array(array).shape} | {
        "parameters": {"binary_data_size": size} | more
    }


def raw(array: Any) -> bytes:
    return np.array(array, "<i8").tobytes()


def infer(client: httpx.Client, *inputs: Any, model: str = "gpt", **more: Any) -> httpx.Response:
    document = {"inputs": inputs, "outputs": [{"name": "embeddings"}]} | more
    return client.post(f"/v2/models/{model}/infer", json=document)


def infer_binary(
    client: httpx.Client, document: dict[str, Any], data: bytes, length: str | None = None, model: str = "gpt"
) -> httpx.Response:
    header = json.dumps({"outputs": [{"name": "embeddings"}]} | document).encode()
    headers = {
        HEADER_LENGTH: str(len(header)) if length is None else length,
        "Content-Type": "application/octet-stream",
    }
    return client.post(f"/v2/models/{model}/infer", content=header + data, headers=headers)


def vectors_of(response: httpx.Response) -> Vectors:
    """Return the vectors (T, D) of either form of answer."""
    assert response.status_code == 200, response.text
    length = response.headers.get(HEADER_LENGTH)
    document = json.loads(response.content[: None if length is None else int(length)])
    output = document["outputs"][0]
    assert (output["name"], output["datatype"]) == ("embeddings", "FP32")
    if length is None:
        assert response.headers["Content-Type"] == "application/json"
        return np.array(output["data"], np.float32).reshape(-1, output["shape"][-1])
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert output["parameters"] == {"binary_data_size": len(response.content) - int(length)}
    assert "data" not in output
    return np.frombuffer(response.content[int(length) :], "<f4").reshape(-1, output["shape"][-1])


def error_of(response: httpx.Response) -> str:
    assert 400 <= response.status_code < 500
    assert response.headers["Content-Type"] == "application/json"
    document = response.json()
    assert document.keys() - ITEM_FIELDS == {"error"}
    return str(document["error"])


MIXED = {
    "input_ids": IDS,
    "offset": [1, 2],
    "token_type_ids": [[0, 1, 0], [1, 0, 1]],
    "attention_mask": [[0, 1, 1], [1, 1, 0]],
}
