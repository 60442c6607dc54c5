"""Requests beyond plain tensors: raw bodies, parameters, narrow types. Oracles: the native API, and gRPC beside HTTP.

The same mistake is made over HTTP and over gRPC, and has to be told in the same words and as the same kind of error.
"""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.http.errors import STATUS
from preblock.service.core import errors
from tests.service.api.http.routes.v2_calls import (
    HEADER_LENGTH,
    IDS,
    declared,
    error_of,
    infer,
    infer_binary,
    raw,
    tensor,
    vectors_of,
)
from tests.support.protocols import Clients, RequestRefused, call_grpc, native_bytes

GRPC_STATUS: dict[type[errors.PreblockError], str] = {
    errors.Invalid: "StatusCode.INVALID_ARGUMENT",
    errors.Malformed: "StatusCode.INVALID_ARGUMENT",
    errors.NotFound: "StatusCode.NOT_FOUND",
    errors.Forbidden: "StatusCode.PERMISSION_DENIED",
}


def infer_raw(client: httpx.Client, body: bytes, model: str = "gpt") -> httpx.Response:
    headers = {HEADER_LENGTH: "0", "Content-Type": "application/octet-stream"}
    return client.post(f"/v2/models/{model}/infer", content=body, headers=headers)


def test_raw_body_is_one_row_with_binary_response(tiny: httpx.Client, tiny_clients: Clients) -> None:
    answer = infer_raw(tiny, raw([1, 2, 3]))
    length = int(answer.headers[HEADER_LENGTH])
    document = json.loads(answer.content[:length])
    vectors = native_bytes(tiny_clients, "gpt", {"input_ids": [[1, 2, 3]]})
    assert answer.content[length : length + vectors.nbytes] == vectors.tobytes()
    assert [output["name"] for output in document["outputs"]] == ["embeddings", "token_embeddings"]
    assert document["outputs"][0]["shape"] == [1, 3, 4]
    assert "id" not in document


@pytest.mark.parametrize("size", [0, 1, 7, 9, 23])
def test_raw_body_without_whole_ids_is_rejected(tiny: httpx.Client, size: int) -> None:
    error = error_of(infer_raw(tiny, bytes(size)))
    assert error == f"body: got {size} bytes, expected input_ids of shape [1, -1]: 8 bytes for each"


def test_raw_body_with_id_out_of_range_is_rejected(tiny: httpx.Client) -> None:
    assert error_of(infer_raw(tiny, raw([1, 7]))) == "input_ids[0][1]: got 7, expected 0 to 6"


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "float16", "bfloat16"])
@pytest.mark.parametrize("own", [False, True])
def test_dtype_parameter_sets_response_datatype(tiny: httpx.Client, datatype: str, own: bool) -> None:
    half = datatype in ("FP16", "float16")
    expected = tiny.post(
        "/models/gpt/embed",
        json={"input_ids": IDS, "dtype": "float16" if half else "bfloat16"},
        headers={"Accept": "application/octet-stream"},
    ).content
    more: dict[str, Any] = {"parameters": {"dtype": datatype, "binary_data_output": True}}
    if own:
        more = {"outputs": [{"name": "embeddings", "parameters": {"dtype": datatype, "binary_data": True}}]}
    answer = infer(tiny, tensor(), **more)
    length = int(answer.headers[HEADER_LENGTH])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert (output["datatype"], output["parameters"]["binary_data_size"]) == ("FP16" if half else "BF16", len(expected))
    assert answer.content[length:] == expected


def test_output_dtype_overrides_request_dtype(tiny: httpx.Client) -> None:
    outputs = [{"name": "embeddings", "parameters": {"dtype": "FP32"}}]
    answer = infer(tiny, tensor(), parameters={"dtype": "FP16"}, outputs=outputs)
    assert answer.json()["outputs"][0]["datatype"] == "FP32"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_narrow_dtype_as_json_is_rejected(tiny: httpx.Client, datatype: str) -> None:
    error = error_of(infer(tiny, tensor(), parameters={"dtype": datatype}))
    allowed = f"expected binary_data, since {datatype} has no form in JSON"
    assert error == f"outputs embeddings: got {datatype} as JSON, {allowed}"


def test_outputs_with_different_dtypes_are_rejected(tiny: httpx.Client) -> None:
    outputs = [{"name": "embeddings", "parameters": {"dtype": "FP16"}}, {"name": "token_embeddings"}]
    error = error_of(infer(tiny, tensor(), outputs=outputs, parameters={"binary_data_output": True}))
    assert error == "outputs[1].parameters.dtype: got FP32, expected FP16, because all outputs have one type"


@pytest.mark.parametrize(
    "parameters", [{"offset": 2}, {"offset": 2, "priority": 3, "timeout": 5, "content_type": "np"}]
)
def test_offset_parameter_is_accepted(tiny: httpx.Client, tiny_clients: Clients, parameters: dict[str, Any]) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2})
    assert vectors_of(infer(tiny, tensor(), parameters=parameters)).tobytes() == expected.tobytes()


def test_unknown_field_is_rejected(tiny: httpx.Client) -> None:
    error = error_of(infer(tiny, tensor(), offset=2))
    assert error == "unknown field offset; expected id, parameters, inputs, outputs, model_name"
    assert infer(tiny, tensor(), model_name="gpt").status_code == 200


REQUEST = (
    "offset, truncate, pooling, dtype, placeholder_id, binary_data_output, content_type, sequence_id, sequence_start, "
    "sequence_end, priority, timeout, triton_enable_empty_final_response"
)
DTYPES = "FP32, FP16, BF16, float32, float16, bfloat16, stored"
INTEGER = "an integer, 0 or more"
PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"headers": "x"}, f"parameters: got the reserved name headers, expected {REQUEST}"),
    ({"triton_x": 5}, f"parameters: got the reserved name triton_x, expected {REQUEST}"),
    ({"binary_data": True}, f"parameters: got the reserved name binary_data, expected {REQUEST}"),
    ({"shared_memory_region": "x"}, f"parameters: got the reserved name shared_memory_region, expected {REQUEST}"),
    ({"truncate": "middle"}, "truncate: got middle, expected left, right"),
    ({"truncate": True}, "truncate: got True, expected left, right"),
    ({"pooling": "max"}, "pooling: got max, expected none, mean, first, last"),
    ({"sequence_id": True}, "parameters.sequence_id: got True, expected an integer of 64 bits, or a text"),
    (
        {"sequence_id": 2**64 - 1},
        f"parameters.sequence_id {2**64 - 1} does not run on gpt version 1; its first request has sequence_start",
    ),
    ({"dtype": "FP64"}, f"parameters.dtype: got FP64, expected {DTYPES}"),
    ({"dtype": 16}, f"parameters.dtype: got 16, expected {DTYPES}"),
    ({"offset": -1}, "offset[0]: got -1, expected 0 or more"),
    ({"offset": 5}, "offset[0] + tokens: got 5 + 2 = 7, expected at most 6, the max_len of this model"),
    ({"offset": 2**63}, f"parameters.offset: got {2**63}, expected a 64-bit integer"),
    ({"offset": 1.5}, "parameters.offset: got 1.5, expected a 64-bit integer"),
    ({"offset": True}, "parameters.offset: got True, expected a 64-bit integer"),
    ({"offset": "1"}, "parameters.offset: got '1', expected a 64-bit integer"),
    ({"binary_data_output": 1}, "parameters.binary_data_output: got 1, expected true or false"),
    ({"content_type": "str"}, "parameters.content_type: got str, expected np, an unchanged tensor"),
    ({"priority": -1}, f"parameters.priority: got -1, expected {INTEGER}"),
    ({"timeout": "1"}, f"parameters.timeout: got 1, expected {INTEGER}"),
]
SHARED = "shared_memory_region, shared_memory_offset, shared_memory_byte_size"
OUTPUT = f"dtype, binary_data, content_type, {SHARED}"
OUTPUTS: list[tuple[dict[str, Any], str]] = [
    ({"classification": 3}, f"outputs[0].parameters: got the reserved name classification, expected {OUTPUT}"),
    (
        {"shared_memory_region": "x"},
        "outputs[0].parameters.shared_memory_byte_size: got nothing, expected an integer, 1 or more",
    ),
    (
        {"shared_memory_region": 1, "shared_memory_byte_size": 8},
        "outputs[0].parameters.shared_memory_region: got 1, expected the name of a registered region",
    ),
    (
        {"shared_memory_region": "x", "shared_memory_byte_size": 8, "shared_memory_offset": -1},
        "outputs[0].parameters.shared_memory_offset: got -1, expected an integer, 0 or more",
    ),
    (
        {"shared_memory_region": "x", "shared_memory_byte_size": 8, "binary_data": True},
        "outputs[0].parameters: got binary_data and shared_memory_region, expected one of them",
    ),
    ({"dtype": "INT64"}, f"outputs[0].parameters.dtype: got INT64, expected {DTYPES}"),
    ({"binary_data": "yes"}, "outputs[0].parameters.binary_data: got yes, expected true or false"),
]
INPUTS: list[tuple[dict[str, Any], str]] = [
    (
        {"shared_memory_byte_size": 8},
        "inputs[0].parameters.shared_memory_region: got nothing, expected the name of a registered region",
    ),
    (
        {"classification": 3},
        "inputs[0].parameters: got the reserved name classification, expected "
        f"binary_data_size, content_type, {SHARED}",
    ),
    ({"content_type": "base64"}, "inputs[0].parameters.content_type: got base64, expected np, an unchanged tensor"),
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
    assert (response.status_code, error_of(response)) == (400, error)
    message = service_pb2.ModelInferRequest(model_name="gpt")
    sent = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    sent.contents.int64_contents.extend([1, 2])
    output = message.outputs.add(name="embeddings")
    set_all({"request": message, "input": sent, "output": output}[place].parameters, values)
    with pytest.raises(RequestRefused) as refused:
        call_grpc(tiny_clients, "ModelInfer", message)
    assert (refused.value.status, refused.value.message) == ("StatusCode.INVALID_ARGUMENT", error)


def test_offset_parameter_with_other_positions_is_rejected(tiny: httpx.Client) -> None:
    error = error_of(infer(tiny, tensor(), tensor("offset", [1]), parameters={"offset": 1}))
    assert error == "parameters.offset: got an offset and an input offset, expected one of them"
    error = error_of(infer(tiny, tensor(), tensor("position_ids", [[0, 1, 2]] * 2), parameters={"offset": 1}))
    assert error.startswith("offset and position_ids exclude each other")


def test_parameter_without_value_counts_as_absent(tiny_clients: Clients) -> None:
    message = service_pb2.ModelInferRequest(model_name="gpt")
    message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2]).contents.int64_contents.extend([1, 2])
    expected = call_grpc(tiny_clients, "ModelInfer", message)
    for name in ("offset", "dtype", "headers"):
        message.parameters[name].SetInParent()
    assert call_grpc(tiny_clients, "ModelInfer", message) == expected


@pytest.mark.parametrize("size", [8, 24])
def test_wrong_binary_size_over_grpc_is_rejected(tiny_clients: Clients, size: int) -> None:
    message = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=[bytes(16)])
    sent = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
    sent.parameters["binary_data_size"].int64_param = size
    with pytest.raises(RequestRefused, match=rf"binary_data_size: got {size}, expected 16, the bytes of its"):
        call_grpc(tiny_clients, "ModelInfer", message)
    sent.parameters["binary_data_size"].int64_param = 16
    assert call_grpc(tiny_clients, "ModelInfer", message).outputs[0].shape == [1, 2, 4]


QUESTIONS: list[tuple[str, str, str, dict[str, str], type[errors.PreblockError]]] = [
    ("get", "/v2/models/nope/config", "ModelConfig", {"name": "nope"}, errors.NotFound),
    ("get", "/v2/models/bert/versions/3/config", "ModelConfig", {"name": "bert", "version": "3"}, errors.NotFound),
    ("get", "/v2/models/nope/stats", "ModelStatistics", {"name": "nope"}, errors.NotFound),
    ("get", "/v2/models/bert/versions/x/stats", "ModelStatistics", {"name": "bert", "version": "x"}, errors.NotFound),
    ("post", "/v2/repository/models/bert/load", "RepositoryModelLoad", {"model_name": "bert"}, errors.Forbidden),
    ("post", "/v2/repository/models/gpt/unload", "RepositoryModelUnload", {"model_name": "gpt"}, errors.Forbidden),
]


@pytest.mark.parametrize(("verb", "path", "method", "fields", "kind"), QUESTIONS, ids=[q[1] for q in QUESTIONS])
def test_error_is_equal_over_http_and_grpc(
    tiny_clients: Clients, verb: str, path: str, method: str, fields: dict[str, str], kind: type[errors.PreblockError]
) -> None:
    response = tiny_clients.http.request(verb, path)
    with pytest.raises(RequestRefused) as refused:
        call_grpc(tiny_clients, method, getattr(service_pb2, f"{method}Request")(**fields))
    assert (response.status_code, refused.value.status) == (STATUS[kind], GRPC_STATUS[kind])
    assert error_of(response) == refused.value.message


@pytest.mark.parametrize("path", ["/v2/models/bert/config", "/v2/models/bert/versions/2/config"])
def test_model_config_is_equal_over_http_and_grpc(tiny_clients: Clients, path: str) -> None:
    http = tiny_clients.http.get(path).json()
    config = tiny_clients.grpc.get_model_config("bert", "2").config
    assert [(t.name, list(t.dims), t.optional) for t in config.input] == [
        (t["name"], t["dims"], t["optional"]) for t in http["input"]
    ]
    assert [(t.name, list(t.dims)) for t in config.output] == [(t["name"], t["dims"]) for t in http["output"]]
    assert config.version_policy.WhichOneof("policy_choice") == next(iter(http["version_policy"])) == "all"
    assert (config.max_batch_size, config.platform) == (http["max_batch_size"], http["platform"])


def test_index_with_ready_filter_lists_ready_models(tiny: httpx.Client) -> None:
    whole = tiny.post("/v2/repository/index").json()
    assert whole[0] == {"name": "bert", "version": "1", "state": "READY", "reason": ""}
    assert tiny.post("/v2/repository/index", json={"ready": True}).json() == whole


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"ready": 1}, "ready: got 1, expected true or false"),
        ({"name": "x"}, "unknown field name; expected ready"),
    ],
)
def test_bad_index_request_is_rejected(tiny: httpx.Client, body: dict[str, Any], error: str) -> None:
    assert error_of(tiny.post("/v2/repository/index", json=body)) == error


def test_statistics_list_batches_up_to_64_rows(tiny: httpx.Client) -> None:
    for rows in (64, 65, 70):
        tiny.post("/models/gpt/embed", json={"input_ids": [[1]] * rows})
    (stats,) = tiny.get("/v2/models/gpt/stats").json()["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    assert 64 in sizes
    assert max(sizes) == 64
    assert stats["execution_count"] >= sum(sizes.values()) + 2


def test_binary_request_may_have_float16_response(tiny: httpx.Client) -> None:
    parameters = {"dtype": "FP16", "binary_data_output": True}
    answer = infer_binary(tiny, {"inputs": [declared(IDS)], "parameters": parameters}, raw(IDS))
    length = int(answer.headers[HEADER_LENGTH])
    assert np.frombuffer(answer.content[length:], np.float16).shape == (24,)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"inputs": [tensor("input_ids", [[1]]) | {"dtype": "x"}]}, "inputs[0]: got dtype, expected name, datatype, "),
        (
            {"inputs": [tensor("input_ids", [[1]])], "outputs": [{"name": "embeddings", "binary_data": True}]},
            "outputs[0]: got binary_data, expected name, parameters",
        ),
    ],
)
def test_unknown_tensor_key_is_rejected(tiny: httpx.Client, document: Any, message: str) -> None:
    response = tiny.post("/v2/models/gpt/infer", json=document)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)
