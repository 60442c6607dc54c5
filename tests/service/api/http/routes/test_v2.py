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

OUTPUTS = (
    "embeddings, token_embeddings, lengths, next_offset, next_context, position_delta, truncated, input_ids, spans, "
    "each once"
)
FLAT = [1, 2, 3, 4, 5, 6]
NESTED = "inputs[0].data: got nested lists of the sizes [{}], expected the sizes [{}], or a flat list"


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


def test_metadata_without_segments_lists_no_token_type_ids(triton: Any) -> None:
    inputs = [described["name"] for described in triton.get_model_metadata("gpt")["inputs"]]
    assert inputs == ["input_ids", "attention_mask", "offset"]


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/nope/ready", "/v2/models/bert/versions/3", "/v2/nope"])
def test_unknown_v2_path_is_404(tiny_http: httpx.Client, path: str) -> None:
    response = tiny_http.get(path)
    assert response.status_code == 404
    assert error_of(response)


def test_wrong_method_is_405(tiny_http: httpx.Client) -> None:
    response = tiny_http.get("/v2/models/bert/infer")
    assert response.status_code == 405
    assert response.headers["Allow"] == "POST, OPTIONS"
    assert error_of(response) == "GET /v2/models/bert/infer: Method Not Allowed"


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


@pytest.mark.parametrize("offset", [[2], [2, 3]])
def test_offset_is_scalar_or_per_row(tiny_http: httpx.Client, tiny_clients: Clients, offset: list[int]) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": offset})
    assert vectors_of(infer(tiny_http, tensor(), tensor("offset", offset))).tobytes() == expected.tobytes()


def test_input_order_does_not_matter(tiny_http: httpx.Client) -> None:
    one, other = tensor(), tensor("offset", [3])
    assert infer(tiny_http, one, other).json() == infer(tiny_http, other, one).json()


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
        ([tensor(), tensor()], "inputs.name: got input_ids twice, expected each name once"),
        (
            [tensor(), tensor("x")],
            "inputs.name: got x, expected input_ids, attention_mask, position_ids, offset",
        ),
        ([tensor("Input_ids")], "inputs.name: got Input_ids, expected input_ids, "),
        ([tensor(datatype="INT16")], "input_ids.datatype: got INT16, expected INT64 or INT32"),
        ([tensor(datatype="int64")], "input_ids.datatype: got int64, expected INT64"),
        ([tensor(datatype="FP32")], "input_ids.datatype: got FP32, expected INT64"),
        ([tensor(datatype="BYTES")], "input_ids.datatype: got BYTES, expected INT64"),
        ([tensor(datatype="INT32", data=[2**31], shape=[1, 1])], f"input_ids.data[0]: got {2**31}, expected a 32-bit"),
        ([tensor(datatype=None)], "inputs[0]: got ['input_ids', None], expected two strings, name and datatype"),
        ([tensor(name=5)], "inputs[0]: got [5, 'INT64'], expected two strings, name and datatype"),
        ([tensor(data=FLAT, shape=[6])], "input_ids.shape: got [6], expected [batch, length]"),
        ([tensor(data=FLAT, shape=[2, 3, 1])], "input_ids.shape: got [2, 3, 1], expected [batch, length]"),
        ([tensor(data=FLAT, shape=[])], "input_ids.shape: got [], expected [batch, length]"),
        ([tensor(), tensor("offset", [[1]])], "offset.shape: got [1, 1], expected [1] or [batch]"),
        ([tensor(), tensor("offset", 1)], "inputs[1].data: got 1, expected a list"),
        ([tensor(), tensor("offset", [])], "offset.shape: got [0], expected sizes of 1 or more"),
        ([tensor(data=FLAT, shape=[2, 4])], "input_ids.data: got 6 values, expected 8 for shape [2, 4]"),
        ([tensor(data=FLAT, shape=[1, 1])], "input_ids.data: got 6 values, expected 1 for shape [1, 1]"),
        ([tensor(shape=[-2, -3])], "inputs[0].shape: got [-2, -3], expected a list of sizes"),
        ([tensor(shape=[-1, 3])], "inputs[0].shape: got [-1, 3], expected a list of sizes"),
        ([tensor(shape=[2.0, 3.0])], "inputs[0].shape: got [2.0, 3.0], expected a list of sizes"),
        ([tensor(shape=[True, 6])], "inputs[0].shape: got [True, 6], expected a list of sizes"),
        ([tensor(shape="2,3")], "inputs[0].shape: got 2,3, expected a list of sizes"),
        ([tensor(shape=None)], "inputs[0].shape: got None, expected a list of sizes"),
        (
            [tensor(data=FLAT, shape=[2**32, 2**32])],
            f"input_ids.data: got 6 values, expected {2**64} for shape [{2**32}, {2**32}]",
        ),
        (
            [tensor(data=FLAT, shape=[2**63, 2])],
            f"input_ids.data: got 6 values, expected {2**64} for shape [{2**63}, 2]",
        ),
        ([tensor(data=[], shape=[2**40, 0])], f"input_ids.shape: got [{2**40}, 0], expected sizes of 1 or more"),
        ([tensor(data=[], shape=[0, 2**63])], f"input_ids.shape: got [0, {2**63}], expected sizes of 1 or more"),
        ([tensor(data=[[1, 2], 3], shape=[1, 3])], "inputs[0].data: got lists beside numbers, expected nested lists"),
        (
            [tensor(data=[[1, 2], [[3], [4]]], shape=[2, 2])],
            "inputs[0].data: got lists beside numbers, expected nested lists",
        ),
        ([tensor(data=[[1, 2], [3, 4], [5, 6]], shape=[2, 3])], NESTED.format("3, 2", "2, 3")),
        ([tensor(data=[FLAT], shape=[2, 3])], NESTED.format("1, 6", "2, 3")),
        ([tensor(data=[[[1], [2]], [[3], [4]]], shape=[2, 2])], NESTED.format("2, 2, 1", "2, 2")),
        ([tensor(data=[[1], [2, 3, 4]], shape=[2, 2])], NESTED.format("2, 1 to 3", "2, 2")),
        ([tensor(data=[[1, 2], []], shape=[1, 2])], NESTED.format("2, 0 to 2", "1, 2")),
        ([tensor(data=None)], "inputs[0].data: got None, expected a list"),
        ([tensor(data="1", shape=[1, 1])], "inputs[0].data: got 1, expected a list"),
        ([tensor(parameters=5)], "inputs[0].parameters: got 5, expected an object"),
        ([declared(IDS) | {"data": IDS}], "inputs[0]: got data and binary_data_size, expected one of them"),
        (["input_ids"], "inputs: got ['input_ids'], expected a list of objects"),
        ({}, "inputs: got {}, expected a list of objects"),
        (None, "inputs: got nothing, expected a list of objects"),
        ([], "inputs: got no input_ids, expected a tensor input_ids"),
    ],
)
def test_bad_input_tensor_is_rejected(tiny_http: httpx.Client, inputs: Any, error: str) -> None:
    assert error_of(tiny_http.post("/v2/models/gpt/infer", json={"inputs": inputs})).startswith(error)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"outputs": [{"name": "x"}]}, f"outputs[0].name: got x, expected {OUTPUTS}"),
        ({"outputs": [{}]}, f"outputs[0].name: got None, expected {OUTPUTS}"),
        (
            {"outputs": [{"name": "embeddings"}] * 2},
            f"outputs[1].name: got embeddings, expected {OUTPUTS}",
        ),
        ({"outputs": {"name": "embeddings"}}, "outputs: got {'name': 'embeddings'}, expected a list of objects"),
        (
            {"outputs": [{"name": "embeddings", "parameters": {"binary_data": 1}}]},
            "outputs[0].parameters.binary_data: got 1, expected true or false",
        ),
        (
            {"parameters": {"binary_data_output": "yes"}},
            "parameters.binary_data_output: got yes, expected true or false",
        ),
        ({"parameters": []}, "parameters: got [], expected an object"),
        ({"id": 5}, "id: got 5, expected a string"),
    ],
)
def test_bad_output_options_are_rejected(tiny_http: httpx.Client, more: dict[str, Any], error: str) -> None:
    assert error_of(infer(tiny_http, tensor(), **more)) == error


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
