"""Errors of the Open Inference Protocol. The same mistake has one message over HTTP and gRPC."""

import json
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.http.errors import STATUS
from preblock.service.core import errors
from tests.service.api.http.routes.v2_calls import (
    IDS,
    declared,
    error_of,
    infer,
    infer_binary,
    outputs,
    raw,
    tensor,
    texts,
)
from tests.support.open_inference import HEADER_LENGTH
from tests.support.protocols import Clients, RequestRefused, call_grpc

FLAT = [1, 2, 3, 4, 5, 6]
TEXT = texts(["a"])
BINARY = {"binary_data_output": True}
BAD_IDS: list[tuple[Any, str]] = [
    ([tensor(), tensor()], "inputs.name: got input_ids twice"),
    ([tensor(datatype="INT16")], "input_ids.datatype: got INT16"),
    ([tensor(datatype="INT32", data=[2**31], shape=[1, 1])], f"input_ids.data[0]: got {2**31}"),
    ([tensor(datatype=None)], "inputs[0]: got ['input_ids', None]"),
    ([tensor(data=FLAT, shape=[])], "input_ids.shape: got []"),
    ([tensor(), tensor("offset", [[1]])], "offset.shape: got [1, 1]"),
    ([tensor(shape=[-1, 3])], "inputs[0].shape: got [-1, 3]"),
    ([tensor(shape=[True, 6])], "inputs[0].shape: got [True, 6]"),
    ([tensor(shape=None)], "inputs[0].shape: got None"),
    ([tensor(data=FLAT, shape=[2**32, 2**32])], "input_ids.data: got 6 values"),
    ([tensor(data=[], shape=[2**40, 0])], f"input_ids.shape: got [{2**40}, 0]"),
    ([tensor(data=[[1, 2], [[3], [4]]], shape=[2, 2])], "inputs[0].data: got lists beside numbers"),
    ([tensor(data=[[[1], [2]], [[3], [4]]], shape=[2, 2])], "inputs[0].data: got nested lists of the sizes [2, 2, 1]"),
    ([tensor(data=[[1], [2, 3, 4]], shape=[2, 2])], "inputs[0].data: got nested lists of the sizes [2, 1 to 3]"),
    ([tensor(data=None)], "inputs[0].data: got None"),
    ([tensor() | {"dtype": "x"}], "inputs[0]: got dtype, expected name, datatype, "),
    ([declared(IDS) | {"data": IDS}], "inputs[0]: got data and binary_data_size"),
    (["input_ids"], "inputs: got ['input_ids']"),
    ({}, "inputs: got {}"),
    (None, "inputs: got nothing"),
    ([], "inputs: got no input_ids"),
    ([TEXT], "inputs.name: got text"),
]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"outputs": outputs("embeddings", "embeddings")}, "outputs[1].name: got embeddings"),
    ({"outputs": outputs("x")}, "outputs[0].name: got x"),
    ({"outputs": outputs("embeddings", binary_data=1)}, "outputs[0].parameters.binary_data: got 1"),
    ({"outputs": outputs("embeddings", "spans")}, "outputs: spans needs the input text, because it"),
    ({"outputs": outputs("lengths")}, "outputs: got lengths"),
    (
        {"outputs": [*outputs("embeddings", dtype="FP16"), *outputs("token_embeddings")], "parameters": BINARY},
        "outputs[1].parameters.dtype: got FP32, expected FP16, because all outputs have one type",
    ),
    ({"outputs": outputs("embeddings", dtype="BF16")}, "outputs embeddings: got BF16 as JSON, expected binary_data"),
    ({"parameters": []}, "parameters: got []"),
    ({"id": 5}, "id: got 5"),
    ({"offset": 2}, "unknown field offset; expected id, parameters, inputs, outputs, model_name"),
    (
        {"inputs": [tensor(), tensor("offset", [1])], "parameters": {"offset": 1}},
        "parameters.offset: got an offset and an input offset",
    ),
]
BAD_TEXTS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([TEXT, tensor()], {}, "input_ids cannot be used with text"),
    ([texts(["a"], shape=[2])], {}, "text.data: got 1 values"),
    ([texts([5])], {}, "text[0]: got 5"),
    ([TEXT], {"sequence_id": 5}, "parameters.sequence_id: got 5"),
    ([], {}, "inputs: got no input_ids"),
]


def test_bad_json_request_is_rejected(tiny_http: httpx.Client) -> None:
    documents: list[tuple[str, dict[str, Any], str]] = [
        *(("gpt", {"inputs": inputs}, error) for inputs, error in BAD_IDS),
        *(("gpt", {"inputs": [tensor()]} | options, error) for options, error in BAD_OPTIONS),
        *(("bert", {"inputs": inputs, "parameters": options}, error) for inputs, options, error in BAD_TEXTS),
    ]
    for model, document, error in documents:
        response = tiny_http.post(f"/v2/models/{model}/infer", json=document)
        assert (response.status_code, error_of(response)[: len(error)]) == (400, error), document
    assert infer(tiny_http, tensor(), model_name="gpt").status_code == 200


def sized(size: Any) -> dict[str, Any]:
    return {"inputs": [declared(IDS, binary_data_size=size)]}


SIZES: tuple[Any, ...] = (-8, -1, 2**31, 2**63, 2**64 - 1, "48", 48.0, True, [48], {})
BAD_BYTES: list[tuple[dict[str, Any], bytes, str]] = [
    *((sized(size), raw(IDS), "inputs[0].binary_data_size: got ") for size in SIZES),
    (sized(49), raw(IDS), "inputs[0].binary_data_size: got 49, expected 0 to 48, the remaining bytes"),
    (
        {"inputs": [declared(IDS), declared([0, 0], "offset")]},
        raw(IDS) + bytes(8),
        "inputs[1].binary_data_size: got 16, expected 0 to 8",
    ),
    *((sized(48), raw(IDS) + bytes(more), f"body: got {more} bytes more, expected the bytes that ") for more in (1, 8)),
    *((sized(48), raw(IDS)[less:], "inputs[0].binary_data_size: got 48, expected 0 to ") for less in (1, 8, 48)),
    *((sized(size), bytes(size), f"input_ids: got {size} bytes, expected 48 bytes for shape") for size in (0, 8, 47)),
]


def test_bad_binary_request_is_rejected(tiny_http: httpx.Client) -> None:
    for document, data, error in BAD_BYTES:
        assert error_of(infer_binary(tiny_http, document, data)).startswith(error), (document, data)
    for size in (0, 1, 7, 9, 23):
        told = error_of(tiny_http.post("/v2/models/gpt/infer", content=bytes(size), headers={HEADER_LENGTH: "0"}))
        assert told == f"body: got {size} bytes, expected input_ids of shape [1, -1]: 8 bytes for each"


def test_invalid_header_length_is_rejected(tiny_http: httpx.Client) -> None:
    content = json.dumps({"inputs": [tensor()]})
    large = (str(len(content) + 1), "99999999", "18446744073709551616", "9" * 5000)
    for length in ("x", "-1", "1.5", "+5", "1e3", "0x10", "", *large, "٣", "1 2", "1,2"):
        headers = {HEADER_LENGTH.encode(): length.encode()}
        error = error_of(tiny_http.post("/v2/models/gpt/infer", content=content, headers=headers))
        assert error.startswith(f"{HEADER_LENGTH}: got "), length
        assert error.endswith(f", expected 0 to {len(content)}, the length of the body"), length
    for length in ("1", "10"):
        assert error_of(infer_binary(tiny_http, {"inputs": [tensor()]}, b"", length)).startswith("body: not valid JSON")
    behind = json.dumps({"inputs": [declared(IDS)]}).encode() + raw(IDS)
    assert error_of(tiny_http.post("/v2/models/gpt/infer", content=behind)).startswith("body: not valid JSON")


REGION = {"shared_memory_region": "x", "shared_memory_byte_size": 8}
OF_REQUEST: list[tuple[str, Any, str]] = [
    *((name, "x", f"parameters: got the reserved name {name}") for name in ("headers", "triton_x", "binary_data")),
    ("truncate", "middle", "truncate: got middle"),
    ("pooling", "max", "pooling: got max"),
    ("sequence_id", True, "parameters.sequence_id: got True"),
    ("sequence_id", 2**64 - 1, f"parameters.sequence_id {2**64 - 1} does not run on gpt version 1; its first request"),
    ("dtype", "FP64", "parameters.dtype: got FP64"),
    ("offset", 5, "offset[0] + tokens: got 5 + 2 = 7"),
    ("offset", 2**63, f"parameters.offset: got {2**63}"),
    ("offset", True, "parameters.offset: got True"),
    ("binary_data_output", 1, "parameters.binary_data_output: got 1"),
    ("priority", -1, "parameters.priority: got -1"),
    ("timeout", "1", "parameters.timeout: got 1"),
]
PARAMETERS: list[tuple[str, dict[str, Any], str]] = [
    *(("request", {name: value}, error) for name, value, error in OF_REQUEST),
    ("output", {"classification": 3}, "outputs[0].parameters: got the reserved name classification"),
    ("output", {"shared_memory_region": "x"}, "outputs[0].parameters.shared_memory_byte_size: got nothing"),
    ("output", REGION | {"shared_memory_offset": -1}, "outputs[0].parameters.shared_memory_offset: got -1"),
    ("output", REGION | {"binary_data": True}, "outputs[0].parameters: got binary_data and shared_memory_region"),
    ("input", {"shared_memory_byte_size": 8}, "inputs[0].parameters.shared_memory_region: got nothing"),
    ("input", {"content_type": "base64"}, "inputs[0].parameters.content_type: got base64"),
]


def set_all(parameters: Any, values: dict[str, Any]) -> None:
    """Write values into a map of protobuf."""
    for name, value in values.items():
        kinds = {bool: "bool_param", str: "string_param", int: "int64_param"}
        kind = "uint64_param" if type(value) is int and value >= 2**63 else kinds[type(value)]
        setattr(parameters[name], kind, value)


def refused(clients: Clients, message: Any, method: str = "ModelInfer") -> tuple[int | str, str]:
    """Return status and message of a call."""
    with pytest.raises(RequestRefused) as error:
        call_grpc(clients, method, message)
    return error.value.status, error.value.message


def test_bad_parameter_has_same_error_over_http_and_grpc(tiny_clients: Clients) -> None:
    for place, values, error in PARAMETERS:
        document = {"inputs": [tensor(data=[[1, 2]])], "outputs": outputs("embeddings")}
        holder: Any = {"request": document, "input": document["inputs"][0], "output": document["outputs"][0]}
        holder[place]["parameters"] = values
        response = tiny_clients.http.post("/v2/models/gpt/infer", json=document)
        told = error_of(response)
        assert (response.status_code, told[: len(error)]) == (400, error), values
        message = service_pb2.ModelInferRequest(model_name="gpt", outputs=outputs("embeddings"))
        sent = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 2])
        sent.contents.int64_contents.extend([1, 2])
        set_all({"request": message, "input": sent, "output": message.outputs[0]}[place].parameters, values)
        assert refused(tiny_clients, message) == ("StatusCode.INVALID_ARGUMENT", told), values


def test_malformed_text_bytes_are_rejected(tiny_http: httpx.Client) -> None:
    for data, error in (
        (b"", "text: got 0 bytes for 0 texts"),
        (b"\x02\0\0\0a", "text: got 5 bytes for 0 texts"),
        (b"\xff\xff\xff\xffa", "text: got 5 bytes for 0 texts"),
        (b"\x01\0\0\0ab", "text: got 1 bytes more"),
        (b"\x01\0\0\0\xff", "text[0]: got b'\\xff'"),
    ):
        given = texts([""], parameters={"binary_data_size": len(data)}) | {"data": None}
        assert error_of(infer_binary(tiny_http, {"inputs": [given]}, data, model="bert")).startswith(error), data


NOT_FOUND, FORBIDDEN = (errors.NotFound, "NOT_FOUND"), (errors.Forbidden, "PERMISSION_DENIED")
QUESTIONS: list[tuple[str, str, str, dict[str, str], tuple[type[errors.PreblockError], str]]] = [
    ("get", "models/bert/versions/0", "ModelMetadata", {"name": "bert", "version": "0"}, NOT_FOUND),
    ("get", "models/bert/versions/3/config", "ModelConfig", {"name": "bert", "version": "3"}, NOT_FOUND),
    ("get", "models/bert/versions/x/stats", "ModelStatistics", {"name": "bert", "version": "x"}, NOT_FOUND),
    ("post", "repository/models/bert/load", "RepositoryModelLoad", {"model_name": "bert"}, FORBIDDEN),
    ("post", "repository/models/gpt/unload", "RepositoryModelUnload", {"model_name": "gpt"}, FORBIDDEN),
]


def test_error_is_equal_over_http_and_grpc(tiny_clients: Clients) -> None:
    for verb, path, method, fields, (kind, status) in QUESTIONS:
        response = tiny_clients.http.request(verb, f"/v2/{path}")
        assert response.status_code == STATUS[kind], path
        message = getattr(service_pb2, f"{method}Request")(**fields)
        assert refused(tiny_clients, message, method) == (f"StatusCode.{status}", error_of(response)), path


def test_bad_control_request_is_rejected(tiny_http: httpx.Client) -> None:
    for body, error in (({"ready": 1}, "ready: got 1, expected true or false"), ({"name": "x"}, "unknown field name")):
        assert error_of(tiny_http.post("/v2/repository/index", json=body)).startswith(error)
    for parameters in (None, {}, {"unload_dependents": None}):
        for verb in ("load", "unload"):
            response = tiny_http.post(f"/v2/repository/models/bert/{verb}", json={"parameters": parameters})
            assert response.status_code == 403, response.text  # forbidden by the settings, and valid
    for verb, known in (("load", "none, because files alone define a model"), ("unload", "unload_dependents")):
        response = tiny_http.post(f"/v2/repository/models/bert/{verb}", json={"parameters": {"config": "x"}})
        assert error_of(response) == f"parameters: got config, expected {known}"
