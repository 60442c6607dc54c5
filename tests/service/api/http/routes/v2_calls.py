"""Requests of the Open Inference Protocol over HTTP."""

import json
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.open_inference import HEADER_LENGTH
from tests.support.protocols import ITEM_FIELDS, Vectors

IDS = [[1, 2, 3], [4, 5, 6]]
NUMPY_TYPES = {"FP32": np.float32, "INT64": np.int64}
MIXED = {
    "input_ids": IDS,
    "offset": [1, 2],
    "token_type_ids": [[0, 1, 0], [1, 0, 1]],
    "attention_mask": [[0, 1, 1], [1, 1, 0]],
}


def tensor(name: Any = "input_ids", data: Any = IDS, **more: Any) -> dict[str, Any]:
    """Return an input with JSON data."""
    shape = more["shape"] if "shape" in more else np.array(data).shape
    return {"name": name, "datatype": "INT64", "data": data} | more | {"shape": shape}


def texts(data: Any, **more: Any) -> dict[str, Any]:
    return tensor("text", data, datatype="BYTES", **more)


def declared(array: Any, name: str = "input_ids", **more: Any) -> dict[str, Any]:
    """Return an input whose data are bytes after the JSON."""
    given = np.array(array, "<i8")
    parameters = {"binary_data_size": given.nbytes} | more
    return {"name": name, "datatype": "INT64", "shape": given.shape, "parameters": parameters}


def outputs(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name} | ({"parameters": parameters} if parameters else {}) for name in names]


def raw(array: Any) -> bytes:
    return np.array(array, "<i8").tobytes()


def infer(client: httpx.Client, *inputs: Any, model: str = "gpt", **more: Any) -> httpx.Response:
    document = {"inputs": inputs, "outputs": outputs("embeddings")} | more
    return client.post(f"/v2/models/{model}/infer", json=document)


def infer_binary(
    client: httpx.Client, document: dict[str, Any], data: bytes, length: str | None = None, model: str = "gpt"
) -> httpx.Response:
    header = json.dumps({"outputs": outputs("embeddings")} | document).encode()
    headers = {HEADER_LENGTH: length or str(len(header)), "Content-Type": "application/octet-stream"}
    return client.post(f"/v2/models/{model}/infer", content=header + data, headers=headers)


def split(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    """Return the JSON of an answer, and the bytes behind it."""
    assert response.status_code == 200, response.text
    length = int(response.headers.get(HEADER_LENGTH, len(response.content)))
    return json.loads(response.content[:length]), response.content[length:]


def vectors_of(response: httpx.Response) -> Vectors:
    """Return the vectors (T, D) of either form of answer."""
    document, content = split(response)
    output = document["outputs"][0]
    assert (output["name"], output["datatype"]) == ("embeddings", "FP32")
    if HEADER_LENGTH not in response.headers:
        assert response.headers["Content-Type"] == "application/json"
        return np.array(output["data"], np.float32).reshape(-1, output["shape"][-1])
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert output["parameters"] == {"binary_data_size": len(content)}
    assert "data" not in output
    return np.frombuffer(content, "<f4").reshape(-1, output["shape"][-1])


def arrays_of(response: httpx.Response) -> dict[str, NDArray[Any]]:
    """Return the outputs of an answer in JSON by name."""
    return {
        output["name"]: np.array(output["data"], NUMPY_TYPES[output["datatype"]]).reshape(output["shape"])
        for output in split(response)[0]["outputs"]
    }


def error_of(response: httpx.Response) -> str:
    assert 400 <= response.status_code < 500
    assert response.headers["Content-Type"] == "application/json"
    document = response.json()
    assert document.keys() - ITEM_FIELDS == {"error"}
    return str(document["error"])
