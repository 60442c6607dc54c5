"""Requests beyond plain tensors: raw bodies, parameters, narrow types. Oracles: the native API, and gRPC beside HTTP.

The same mistake is made over HTTP and over gRPC, and has to be told in the same words and as the same kind of error.
"""

import json
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.http.errors import STATUS
from preblock.service.core import errors
from tests.service.api.http.routes.v2_calls import HEADER_LENGTH, IDS, error_of, infer, raw, tensor, vectors_of
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


def test_raw_body_is_one_row_with_binary_response(tiny_http: httpx.Client, tiny_clients: Clients) -> None:
    answer = infer_raw(tiny_http, raw([1, 2, 3]))
    length = int(answer.headers[HEADER_LENGTH])
    document = json.loads(answer.content[:length])
    vectors = native_bytes(tiny_clients, "gpt", {"input_ids": [[1, 2, 3]]})
    assert answer.content[length : length + vectors.nbytes] == vectors.tobytes()
    assert [output["name"] for output in document["outputs"]] == ["embeddings", "token_embeddings"]
    assert document["outputs"][0]["shape"] == [1, 3, 4]
    assert "id" not in document


@pytest.mark.parametrize("size", [0, 1, 7, 9, 23])
def test_raw_body_without_whole_ids_is_rejected(tiny_http: httpx.Client, size: int) -> None:
    error = error_of(infer_raw(tiny_http, bytes(size)))
    assert error == f"body: got {size} bytes, expected input_ids of shape [1, -1]: 8 bytes for each"


@pytest.mark.parametrize(("datatype", "own"), [("FP16", False), ("float16", True), ("BF16", True), ("bfloat16", False)])
def test_dtype_parameter_sets_response_datatype(tiny_http: httpx.Client, datatype: str, own: bool) -> None:
    half = datatype in ("FP16", "float16")
    expected = tiny_http.post(
        "/models/gpt/embed",
        json={"input_ids": IDS, "dtype": "float16" if half else "bfloat16"},
        headers={"Accept": "application/octet-stream"},
    ).content
    more: dict[str, Any] = {"parameters": {"dtype": datatype, "binary_data_output": True}}
    if own:
        more = {"outputs": [{"name": "embeddings", "parameters": {"dtype": datatype, "binary_data": True}}]}
    answer = infer(tiny_http, tensor(), **more)
    length = int(answer.headers[HEADER_LENGTH])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert (output["datatype"], output["parameters"]["binary_data_size"]) == ("FP16" if half else "BF16", len(expected))
    assert answer.content[length:] == expected


def test_output_dtype_overrides_request_dtype(tiny_http: httpx.Client) -> None:
    outputs = [{"name": "embeddings", "parameters": {"dtype": "FP32"}}]
    answer = infer(tiny_http, tensor(), parameters={"dtype": "FP16"}, outputs=outputs)
    assert answer.json()["outputs"][0]["datatype"] == "FP32"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_narrow_dtype_as_json_is_rejected(tiny_http: httpx.Client, datatype: str) -> None:
    error = error_of(infer(tiny_http, tensor(), parameters={"dtype": datatype}))
    allowed = f"expected binary_data, since {datatype} has no form in JSON"
    assert error == f"outputs embeddings: got {datatype} as JSON, {allowed}"


def test_outputs_with_different_dtypes_are_rejected(tiny_http: httpx.Client) -> None:
    outputs = [{"name": "embeddings", "parameters": {"dtype": "FP16"}}, {"name": "token_embeddings"}]
    error = error_of(infer(tiny_http, tensor(), outputs=outputs, parameters={"binary_data_output": True}))
    assert error == "outputs[1].parameters.dtype: got FP32, expected FP16, because all outputs have one type"


@pytest.mark.parametrize(
    "parameters", [{"offset": 2}, {"offset": 2, "priority": 3, "timeout": 5, "content_type": "np"}]
)
def test_offset_parameter_is_accepted(
    tiny_http: httpx.Client, tiny_clients: Clients, parameters: dict[str, Any]
) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2})
    assert vectors_of(infer(tiny_http, tensor(), parameters=parameters)).tobytes() == expected.tobytes()


def test_unknown_field_is_rejected(tiny_http: httpx.Client) -> None:
    error = error_of(infer(tiny_http, tensor(), offset=2))
    assert error == "unknown field offset; expected id, parameters, inputs, outputs, model_name"
    assert infer(tiny_http, tensor(), model_name="gpt").status_code == 200


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


def test_index_with_ready_filter_lists_ready_models(tiny_http: httpx.Client) -> None:
    whole = tiny_http.post("/v2/repository/index").json()
    assert whole[0] == {"name": "bert", "version": "1", "state": "READY", "reason": ""}
    assert tiny_http.post("/v2/repository/index", json={"ready": True}).json() == whole


@pytest.mark.parametrize(
    ("body", "error"), [({"ready": 1}, "ready: got 1, expected true or false"), ({"name": "x"}, "unknown field name")]
)
def test_bad_index_request_is_rejected(tiny_http: httpx.Client, body: dict[str, Any], error: str) -> None:
    assert error_of(tiny_http.post("/v2/repository/index", json=body)).startswith(error)


def test_statistics_list_batches_up_to_64_rows(tiny_http: httpx.Client) -> None:
    for rows in (64, 65, 70):
        tiny_http.post("/models/gpt/embed", json={"input_ids": [[1]] * rows})
    (stats,) = tiny_http.get("/v2/models/gpt/stats").json()["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    assert 64 in sizes
    assert max(sizes) == 64
    assert stats["execution_count"] >= sum(sizes.values()) + 2


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
def test_unknown_tensor_key_is_rejected(tiny_http: httpx.Client, document: Any, message: str) -> None:
    response = tiny_http.post("/v2/models/gpt/infer", json=document)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)
