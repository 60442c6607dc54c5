"""Requests of models with other inputs and outputs, and their PyTorch modules."""

import base64
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.late import make_artifacts

V, D, H = 11, 4, 3
Json = dict[str, Any]
IDS = [[1, 2, 3], [4, 5, 6]]


def frontend_of(name: str) -> Any:
    """Return the PyTorch module of a stored artifact."""
    return make_artifacts.build_frontend(name)


def tensor(name: str, value: Any, datatype: str = "INT64") -> dict[str, Any]:
    array = np.array(value)
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def zeros(*shape: int) -> Json:
    return tensor("pixel_values", np.zeros(shape), "FP32")


def infer(http: httpx.Client, model: str, inputs: list[Json], *outputs: str) -> dict[str, NDArray[np.float32]]:
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs]}
    answer = http.post(f"/v2/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    return {o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in answer.json()["outputs"]}


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("detail") or answer.json()["error"]


def decoded(answer: dict[str, Any], name: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(answer[name]), "<f4").reshape(answer["shape"])
