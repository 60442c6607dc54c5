"""Parameters of the Open Inference Protocol: one error over HTTP and gRPC."""

from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.v2_calls import error_of, infer, tensor
from tests.support.protocols import Clients, RequestRefused, call_grpc

PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"headers": "x"}, "parameters: got the reserved name headers"),
    ({"triton_x": 5}, "parameters: got the reserved name triton_x"),
    ({"binary_data": True}, "parameters: got the reserved name binary_data"),
    ({"shared_memory_region": "x"}, "parameters: got the reserved name shared_memory_region"),
    ({"truncate": "middle"}, "truncate: got middle"),
    ({"truncate": True}, "truncate: got True"),
    ({"pooling": "max"}, "pooling: got max"),
    ({"sequence_id": True}, "parameters.sequence_id: got True"),
    (
        {"sequence_id": 2**64 - 1},
        f"parameters.sequence_id {2**64 - 1} does not run on gpt version 1; its first request has sequence_start",
    ),
    ({"dtype": "FP64"}, "parameters.dtype: got FP64"),
    ({"dtype": 16}, "parameters.dtype: got 16"),
    ({"offset": -1}, "offset[0]: got -1"),
    ({"offset": 5}, "offset[0] + tokens: got 5 + 2 = 7"),
    ({"offset": 2**63}, f"parameters.offset: got {2**63}"),
    ({"offset": 1.5}, "parameters.offset: got 1.5"),
    ({"offset": True}, "parameters.offset: got True"),
    ({"offset": "1"}, "parameters.offset: got '1'"),
    ({"binary_data_output": 1}, "parameters.binary_data_output: got 1"),
    ({"content_type": "str"}, "parameters.content_type: got str"),
    ({"priority": -1}, "parameters.priority: got -1"),
    ({"timeout": "1"}, "parameters.timeout: got 1"),
]
OUTPUTS: list[tuple[dict[str, Any], str]] = [
    ({"classification": 3}, "outputs[0].parameters: got the reserved name classification"),
    ({"shared_memory_region": "x"}, "outputs[0].parameters.shared_memory_byte_size: got nothing"),
    ({"shared_memory_region": 1, "shared_memory_byte_size": 8}, "outputs[0].parameters.shared_memory_region: got 1"),
    (
        {"shared_memory_region": "x", "shared_memory_byte_size": 8, "shared_memory_offset": -1},
        "outputs[0].parameters.shared_memory_offset: got -1",
    ),
    (
        {"shared_memory_region": "x", "shared_memory_byte_size": 8, "binary_data": True},
        "outputs[0].parameters: got binary_data and shared_memory_region",
    ),
    ({"dtype": "INT64"}, "outputs[0].parameters.dtype: got INT64"),
    ({"binary_data": "yes"}, "outputs[0].parameters.binary_data: got yes"),
]
INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"shared_memory_byte_size": 8}, "inputs[0].parameters.shared_memory_region: got nothing"),
    ({"classification": 3}, "inputs[0].parameters: got the reserved name classification"),
    ({"content_type": "base64"}, "inputs[0].parameters.content_type: got base64"),
]


def set_all(parameters: Any, values: dict[str, Any]) -> None:
    """Write values into a map of protobuf."""
    for name, value in values.items():
        kinds = {bool: "bool_param", str: "string_param", float: "double_param", int: "int64_param"}
        kind = "uint64_param" if type(value) is int and value >= 2**63 else kinds[type(value)]
        setattr(parameters[name], kind, value)


@pytest.mark.parametrize(
    ("place", "values", "error"),
    [
        *(("request", *case) for case in PARAMETERS),
        *(("output", *case) for case in OUTPUTS),
        *(("input", *case) for case in INPUTS),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 10 else None,
)
def test_bad_parameter_has_same_error_over_http_and_grpc(
    tiny_clients: Clients, place: str, values: dict[str, Any], error: str
) -> None:
    given = tensor(data=[[1, 2]]) | ({"parameters": values} if place == "input" else {})
    outputs = [{"name": "embeddings"} | ({"parameters": values} if place == "output" else {})]
    parameters: dict[str, Any] = {"parameters": values} if place == "request" else {}
    response = infer(tiny_clients.http, given, outputs=outputs, **parameters)
    told = error_of(response)
    assert response.status_code == 400
    assert told.startswith(error)
    message = service_pb2.ModelInferRequest(model_name="gpt")
    sent = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    sent.contents.int64_contents.extend([1, 2])
    output = message.outputs.add(name="embeddings")
    set_all({"request": message, "input": sent, "output": output}[place].parameters, values)
    with pytest.raises(RequestRefused) as refused:
        call_grpc(tiny_clients, "ModelInfer", message)
    assert (refused.value.status, refused.value.message) == ("StatusCode.INVALID_ARGUMENT", told)


def test_offset_parameter_with_other_positions_is_rejected(tiny_http: httpx.Client) -> None:
    error = error_of(infer(tiny_http, tensor(), tensor("offset", [1]), parameters={"offset": 1}))
    assert error.startswith("parameters.offset: got an offset and an input offset")
    error = error_of(infer(tiny_http, tensor(), tensor("position_ids", [[0, 1, 2]] * 2), parameters={"offset": 1}))
    assert error.startswith("offset and position_ids exclude each other")


def test_parameter_without_value_counts_as_absent(tiny_clients: Clients) -> None:
    message = service_pb2.ModelInferRequest(model_name="gpt")
    message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2]).contents.int64_contents.extend([1, 2])
    expected = call_grpc(tiny_clients, "ModelInfer", message)
    for name in ("offset", "dtype", "headers"):
        message.parameters[name].SetInParent()
    assert call_grpc(tiny_clients, "ModelInfer", message) == expected
