"""Which outputs are given: the model's own lookup beside, or in place of, what enters block 0."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray

from tests.support.protocols import Clients

IDS = [[1, 2, 3], [4, 5, 6]]
BOTH = ["token_embeddings", "embeddings"]
Tables = dict[str, NDArray[np.float32]]


def expected(tables: Tables) -> dict[str, NDArray[np.float32]]:
    """Return both outputs for IDS, from the raw tables of `gpt`."""
    tokens = tables["tokens"][np.array(IDS)]
    return {"embeddings": tokens + tables["positions"][:3], "token_embeddings": tokens}


def decoded(text: str, shape: list[int]) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


@pytest.mark.parametrize("output", BOTH)
def test_single_output_is_returned_under_its_name(tiny_http: httpx.Client, tiny_tables: Tables, output: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output}).json()
    assert decoded(answer[output], answer["shape"]).tobytes() == expected(tiny_tables)[output].tobytes()
    assert "outputs" not in answer
    headers = {"Accept": "application/octet-stream"}
    use = answer["use_as"]
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output}, headers=headers)
    assert (answer.headers["Preblock-Output"], answer.headers["Preblock-Use-As"]) == (output, use)
    assert answer.content == expected(tiny_tables)[output].tobytes()


def test_multiple_outputs_are_returned_together(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": BOTH}).json()
    assert list(answer["outputs"]) == BOTH
    for name, output in answer["outputs"].items():
        assert decoded(output["data"], output["shape"]).tobytes() == expected(tiny_tables)[name].tobytes()


def test_unequal_rows_have_every_output(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": [[1], [2, 3]], "output": BOTH}).json()
    assert answer["lengths"] == [1, 2]
    found = answer["outputs"]["token_embeddings"]
    assert decoded(found["data"], found["shape"]).tobytes() == tiny_tables["tokens"][[1, 2, 3]].tobytes()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("x", "output: got x, expected embeddings, token_embeddings"),
        (1, "output: got 1, expected the name of an output, or a list of names"),
        ([], "output: got [], expected the name of an output, or a list of names"),
        (["embeddings", "embeddings"], "output: got ['embeddings', 'embeddings'], expected each name once"),
        ("rotary_cos", "output: got rotary_cos, expected embeddings, token_embeddings"),
    ],
)
def test_invalid_output_is_rejected(tiny_http: httpx.Client, output: Any, message: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": output})
    assert (answer.status_code, answer.json()["detail"]) == (422, message)


@pytest.mark.parametrize("media", ["application/octet-stream", "application/x-npy"])
def test_multiple_outputs_in_single_tensor_format_are_406(tiny_http: httpx.Client, media: str) -> None:
    answer = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "output": BOTH}, headers={"Accept": media})
    assert answer.status_code == 406
    allowed = "application/json or application/x-safetensors for several outputs"
    assert answer.json()["detail"] == f"Accept: got {media}, expected {allowed}"


def test_open_inference_returns_requested_outputs_in_order(tiny_http: httpx.Client, tiny_tables: Tables) -> None:
    ids = {"name": "input_ids", "datatype": "INT64", "shape": [2, 3], "data": IDS}
    outputs = [{"name": BOTH[0], "parameters": {"binary_data": True}}, {"name": BOTH[1]}]
    answer = tiny_http.post("/v2/models/gpt/infer", json={"inputs": [ids], "outputs": outputs})
    length = int(answer.headers["Inference-Header-Content-Length"])
    lookup, embeddings = json.loads(answer.content[:length])["outputs"]
    assert (lookup["name"], lookup["shape"], embeddings["name"]) == ("token_embeddings", [2, 3, 4], "embeddings")
    assert answer.content[length:] == expected(tiny_tables)["token_embeddings"].tobytes()
    assert np.array(embeddings["data"], np.float32).tobytes() == expected(tiny_tables)["embeddings"].tobytes()


def test_grpc_returns_requested_outputs(tiny_clients: Clients, tiny_tables: Tables) -> None:
    ids = tritonclient.grpc.InferInput("input_ids", [2, 3], "INT64")
    ids.set_data_from_numpy(np.array(IDS))
    outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in BOTH]
    answer = tiny_clients.grpc.infer("gpt", [ids], outputs=outputs)
    for name in BOTH:
        assert answer.as_numpy(name).tobytes() == expected(tiny_tables)[name].tobytes()
