"""The Open Inference Protocol over HTTP. Oracles: tritonclient, and the native API."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http

from tests.service.api.http.routes.v2_calls import IDS, MIXED, declared, error_of, infer, tensor, vectors_of
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server

FLAT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def triton(tiny_server: Server) -> Iterator[Any]:
    """tritonclient over HTTP."""
    with tritonclient.http.InferenceServerClient(tiny_server.address.removeprefix("http://")) as client:
        yield client


def test_server_metadata_names_server_version_and_extension(triton: Any) -> None:
    metadata = triton.get_server_metadata()
    assert set(metadata) == {"name", "version", "extensions"}
    assert metadata["name"] == "preblock"
    assert metadata["extensions"] == [
        "binary_tensor_data",
        "model_configuration",
        "model_repository",
        "parameters",
        "sequence",
        "sequence(string_id)",
        "statistics",
    ]


def test_server_is_live_and_ready(triton: Any, tiny_http: httpx.Client) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert tiny_http.get("/v2/health/live").json() == {"live": True}
    assert tiny_http.get("/v2/health/ready").json() == {"ready": True}


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [("bert", "", True), ("bert", "1", True), ("bert", "2", True), ("bert", "3", False), ("nope", "", False)],
)
def test_model_is_ready_only_if_served(triton: Any, model: str, version: str, ready: bool) -> None:
    assert triton.is_model_ready(model, version) is ready


def test_model_metadata_describes_every_tensor(triton: Any) -> None:
    assert triton.get_model_metadata("bert") == {
        "name": "bert",
        "versions": ["1", "2"],
        "platform": "onnx_onnxv1",
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "token_type_ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "offset", "datatype": "INT64", "shape": [-1]},
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": "embeddings", "datatype": "FP32", "shape": [-1, -1, 4]},
            {"name": "token_embeddings", "datatype": "FP32", "shape": [-1, -1, 4]},
        ],
    }


def test_version_metadata_lists_only_its_version(triton: Any) -> None:
    assert triton.get_model_metadata("bert", "1")["versions"] == ["1"]


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/nope/ready", "/v2/models/bert/versions/3", "/v2/nope"])
def test_unknown_v2_path_is_404(tiny_http: httpx.Client, path: str) -> None:
    response = tiny_http.get(path)
    assert response.status_code == 404
    assert error_of(response)


def test_wrong_method_is_405(tiny_http: httpx.Client) -> None:
    response = tiny_http.get("/v2/models/bert/infer")
    assert response.status_code == 405
    assert response.headers["Allow"] == "POST, OPTIONS"
    assert error_of(response) == "GET /v2/models/bert/infer: Method Not Allowed, expected POST"


@pytest.mark.parametrize("data", [IDS, FLAT], ids=["nested", "flat"])
def test_json_data_may_be_nested_or_flat(tiny_http: httpx.Client, tiny_clients: Clients, data: Any) -> None:
    response = infer(tiny_http, tensor(data=data, shape=[2, 3]))
    assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()
    assert response.json()["outputs"][0]["shape"] == [2, 3, 4]


@pytest.mark.parametrize("id_", ["7", "", "é\u0000\U0001f600", None])
def test_request_id_is_echoed(tiny_http: httpx.Client, id_: str | None) -> None:
    document = infer(tiny_http, tensor(), id=id_).json()
    assert document.get("id") == id_
    assert ("id" in document) == (id_ is not None)


@pytest.mark.parametrize("version", [1, 2])
def test_infer_uses_requested_version(tiny_http: httpx.Client, version: int) -> None:
    document = infer(tiny_http, tensor(), model=f"bert/versions/{version}").json()
    assert (document["model_name"], document["model_version"]) == ("bert", str(version))
    same = document["outputs"] == infer(tiny_http, tensor(), model="bert").json()["outputs"]
    assert same == (version == 2)


@pytest.mark.parametrize("outputs", [[], None])
@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_omitted_outputs_default_to_all_declared(tiny_http: httpx.Client, model: str, outputs: Any) -> None:
    declared = [output["name"] for output in tiny_http.get(f"/v2/models/{model}").json()["outputs"]]
    named = [{"name": name} for name in declared]
    found = infer(tiny_http, tensor(), model=model, outputs=outputs).json()
    assert [output["name"] for output in found["outputs"]] == declared == ["embeddings", "token_embeddings"]
    assert found == infer(tiny_http, tensor(), model=model, outputs=named).json()


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([tensor(), tensor()], "inputs.name: got input_ids twice"),
        ([tensor(), tensor("x")], "inputs.name: got x"),
        ([tensor("Input_ids")], "inputs.name: got Input_ids"),
        ([tensor(datatype="INT16")], "input_ids.datatype: got INT16"),
        ([tensor(datatype="INT32", data=[2**31], shape=[1, 1])], f"input_ids.data[0]: got {2**31}"),
        ([tensor(datatype=None)], "inputs[0]: got ['input_ids', None]"),
        ([tensor(data=FLAT, shape=[2, 3, 1])], "input_ids.shape: got [2, 3, 1]"),
        ([tensor(data=FLAT, shape=[])], "input_ids.shape: got []"),
        ([tensor(), tensor("offset", [[1]])], "offset.shape: got [1, 1]"),
        ([tensor(), tensor("offset", 1)], "inputs[1].data: got 1"),
        ([tensor(), tensor("offset", [])], "offset.shape: got [0]"),
        ([tensor(data=FLAT, shape=[2, 4])], "input_ids.data: got 6 values"),
        ([tensor(shape=[-1, 3])], "inputs[0].shape: got [-1, 3]"),
        ([tensor(shape=[2.0, 3.0])], "inputs[0].shape: got [2.0, 3.0]"),
        ([tensor(shape=[True, 6])], "inputs[0].shape: got [True, 6]"),
        ([tensor(shape=None)], "inputs[0].shape: got None"),
        ([tensor(data=FLAT, shape=[2**32, 2**32])], "input_ids.data: got 6 values"),
        ([tensor(data=[], shape=[2**40, 0])], f"input_ids.shape: got [{2**40}, 0]"),
        ([tensor(data=[[1, 2], 3], shape=[1, 3])], "inputs[0].data: got lists beside numbers"),
        ([tensor(data=[[1, 2], [[3], [4]]], shape=[2, 2])], "inputs[0].data: got lists beside numbers"),
        ([tensor(data=[[1, 2], [3, 4], [5, 6]], shape=[2, 3])], "inputs[0].data: got nested lists of the sizes [3, 2]"),
        (
            [tensor(data=[[[1], [2]], [[3], [4]]], shape=[2, 2])],
            "inputs[0].data: got nested lists of the sizes [2, 2, 1]",
        ),
        ([tensor(data=[[1], [2, 3, 4]], shape=[2, 2])], "inputs[0].data: got nested lists of the sizes [2, 1 to 3]"),
        ([tensor(data=[[1, 2], []], shape=[1, 2])], "inputs[0].data: got nested lists of the sizes [2, 0 to 2]"),
        ([tensor(data=None)], "inputs[0].data: got None"),
        ([tensor(parameters=5)], "inputs[0].parameters: got 5"),
        ([declared(IDS) | {"data": IDS}], "inputs[0]: got data and binary_data_size"),
        (["input_ids"], "inputs: got ['input_ids']"),
        ({}, "inputs: got {}"),
        (None, "inputs: got nothing"),
        ([], "inputs: got no input_ids"),
    ],
)
def test_bad_input_tensor_is_rejected(tiny_http: httpx.Client, inputs: Any, error: str) -> None:
    assert error_of(tiny_http.post("/v2/models/gpt/infer", json={"inputs": inputs})).startswith(error)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"outputs": [{"name": "x"}]}, "outputs[0].name: got x"),
        ({"outputs": [{"name": "embeddings"}] * 2}, "outputs[1].name: got embeddings"),
        ({"outputs": {"name": "embeddings"}}, "outputs: got {'name': 'embeddings'}"),
        (
            {"outputs": [{"name": "embeddings", "parameters": {"binary_data": 1}}]},
            "outputs[0].parameters.binary_data: got 1",
        ),
        ({"parameters": {"binary_data_output": "yes"}}, "parameters.binary_data_output: got yes"),
        ({"parameters": []}, "parameters: got []"),
        ({"id": 5}, "id: got 5"),
    ],
)
def test_bad_output_options_are_rejected(tiny_http: httpx.Client, more: dict[str, Any], error: str) -> None:
    assert error_of(infer(tiny_http, tensor(), **more)).startswith(error)


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_tritonclient_response_equals_native_api(
    triton: Any, tiny_clients: Clients, binary_in: bool, binary_out: bool
) -> None:
    inputs = []
    for name, data in MIXED.items():
        array = np.array(data)
        inputs.append(tritonclient.http.InferInput(name, array.shape, "INT64"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary_in)
    output = tritonclient.http.InferRequestedOutput("embeddings", binary_data=binary_out)
    result = triton.infer("bert", inputs, outputs=[output], request_id="42", model_version="2")
    assert result.as_numpy("embeddings").tobytes() == native_bytes(tiny_clients, "bert", MIXED).tobytes()
    assert result.as_numpy("embeddings").shape == (2, 3, 4)
    assert result.get_response()["id"] == "42"
    assert result.get_response()["model_version"] == "2"
