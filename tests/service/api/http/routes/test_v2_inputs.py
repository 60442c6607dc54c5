"""Inputs as other clients write them: INT32, nulls, unknown parameters. Oracle: the same request without them."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.v2_calls import HEADER_LENGTH, IDS, infer, infer_binary, raw, tensor, vectors_of
from tests.support.protocols import Clients, call_grpc, native_bytes


def test_model_list_has_kserve_format(tiny_http: httpx.Client) -> None:
    response = tiny_http.get("/v2/models")
    assert (response.status_code, response.json()) == (200, {"models": ["bert", "gpt"]})


def test_int32_ids_in_json_are_accepted(tiny_http: httpx.Client) -> None:
    given = tensor(datatype="INT32"), tensor("offset", [1], datatype="INT32")
    assert infer(tiny_http, *given).json() == infer(tiny_http, tensor(), tensor("offset", [1])).json()


def test_int32_ids_in_binary_are_accepted_beside_int64(tiny_http: httpx.Client, tiny_clients: Clients) -> None:
    """Bodies of INT64 and INT32 ids take turns, because a cached layout must not read one as the other."""
    for ids in ([[1, 2], [3, 4]], [[4, 3], [2, 1]]):
        for datatype, code in (("INT32", "<i4"), ("INT64", "<i8"), ("INT32", "<i4")):
            data = np.array(ids, code).tobytes()
            sent = {"name": "input_ids", "datatype": datatype, "shape": [2, 2]}
            asked = {"inputs": [sent | {"parameters": {"binary_data_size": len(data)}}]}
            found = vectors_of(infer_binary(tiny_http, asked | {"parameters": {"binary_data_output": True}}, data))
            assert found.tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": ids}).tobytes()


@pytest.mark.parametrize("raw_contents", [False, True])
def test_int32_ids_over_grpc_are_accepted(tiny_clients: Clients, raw_contents: bool) -> None:
    for ids in ([[1, 2]], [[3, 4]], [[1, 2]]):
        message = service_pb2.ModelInferRequest(model_name="gpt", outputs=[{"name": "embeddings"}])
        given = message.inputs.add(name="input_ids", datatype="INT32", shape=[1, 2])
        if raw_contents:
            message.raw_input_contents.append(np.array(ids, "<i4").tobytes())
        else:
            given.contents.int_contents.extend(ids[0])
        answer = call_grpc(tiny_clients, "ModelInfer", message)
        expected = native_bytes(tiny_clients, "gpt", {"input_ids": ids}).tobytes()
        # As in Triton, the answer to typed contents is raw.
        assert list(answer.raw_output_contents) == [expected]
        assert not answer.outputs[0].HasField("contents")


def test_zero_inputs_of_perf_analyzer_are_accepted(tiny_http: httpx.Client) -> None:
    """perf_analyzer without a data file sends all declared inputs, and requests all declared outputs."""
    metadata = tiny_http.get("/v2/models/gpt").json()
    config = {described["name"]: described for described in tiny_http.get("/v2/models/gpt/config").json()["input"]}
    assert list(config) == [described["name"] for described in metadata["inputs"]]
    inputs = []
    for described in metadata["inputs"]:
        shape = [1 if size == -1 else size for size in described["shape"]]
        inputs.append(described | {"shape": shape, "parameters": {"binary_data_size": 8}})
    outputs = [{"name": output["name"], "parameters": {"binary_data": True}} for output in metadata["outputs"]]
    answer = infer_binary(tiny_http, {"inputs": inputs, "outputs": outputs}, bytes(8 * len(inputs)))
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("model", "optional"),
    [
        ("gpt", ["attention_mask", "offset"]),
        ("bert", ["input_ids", "token_type_ids", "attention_mask", "offset", "text"]),
    ],
)
def test_omittable_inputs_are_declared_optional(tiny_http: httpx.Client, model: str, optional: list[str]) -> None:
    config = tiny_http.get(f"/v2/models/{model}/config").json()["input"]
    assert [described["name"] for described in config if described["optional"]] == optional


NULLS: list[dict[str, Any]] = [
    {"parameters": None},
    {"id": None, "model_name": None, "parameters": {}},
    {"parameters": {"offset": None, "dtype": None, "sequence_id": None, "binary_data_output": None, "priority": None}},
    {"parameters": {"headers": None, "unknown": None}},
    {"outputs": [{"name": "embeddings", "parameters": None}]},
    {"outputs": [{"name": "embeddings", "parameters": {"binary_data": None, "dtype": None}}]},
    {"inputs": [tensor(parameters=None)]},
    {"inputs": [tensor(parameters={"binary_data_size": None, "content_type": None})]},
    {"field": None},
]


@pytest.mark.parametrize("nulls", NULLS, ids=range(len(NULLS)))
def test_null_field_counts_as_absent(tiny_http: httpx.Client, nulls: dict[str, Any]) -> None:
    response = infer(tiny_http, tensor(), **nulls)
    assert response.status_code == 200, response.text
    assert response.json() == infer(tiny_http, tensor()).json()


def test_null_data_beside_binary_data_is_accepted(tiny_http: httpx.Client) -> None:
    given = tensor(data=None, shape=[2, 3], parameters={"binary_data_size": 48})
    found = vectors_of(infer_binary(tiny_http, {"inputs": [given]}, raw(IDS)))
    assert found.tobytes() == vectors_of(infer(tiny_http, tensor())).tobytes()


@pytest.mark.parametrize("body", [{"ready": None}, {"ready": False}, {}])
def test_null_in_index_request_counts_as_absent(tiny_http: httpx.Client, body: dict[str, Any]) -> None:
    assert tiny_http.post("/v2/repository/index", json=body).json() == tiny_http.post("/v2/repository/index").json()


@pytest.mark.parametrize("parameters", [None, {}, {"unload_dependents": None}])
def test_null_in_model_control_counts_as_absent(tiny_http: httpx.Client, parameters: Any) -> None:
    for verb in ("load", "unload"):
        response = tiny_http.post(f"/v2/repository/models/bert/{verb}", json={"parameters": parameters})
        assert response.status_code == 403, response.text  # forbidden by the settings, and valid


UNKNOWN = {"max_tokens": 5, "temperature": 0.5, "nested": {"a": [1]}, "timeout": 1}


def test_ignored_parameters_are_named_in_the_response(tiny_http: httpx.Client) -> None:
    given = tensor(parameters={"scale": 2.5})
    outputs = [{"name": "embeddings", "parameters": {"layout": "x"}}]
    document = infer(tiny_http, given, outputs=outputs, parameters=UNKNOWN).json()
    named = "max_tokens, temperature, nested, timeout, inputs[0].parameters.scale, outputs[0].parameters.layout"
    assert document.pop("parameters") == {"ignored_parameters": named}
    assert document == infer(tiny_http, tensor()).json()


def test_ignored_parameters_are_named_in_repeated_responses(tiny_http: httpx.Client) -> None:
    parameters = {"binary_data_output": True, "max_tokens": 5}
    given = tensor(data=None, shape=[2, 3], parameters={"binary_data_size": 48})
    for _ in range(3):
        answer = infer_binary(tiny_http, {"inputs": [given], "parameters": parameters}, raw(IDS))
        header = json.loads(answer.content[: int(answer.headers[HEADER_LENGTH])])
        assert header["parameters"] == {"ignored_parameters": "max_tokens"}
