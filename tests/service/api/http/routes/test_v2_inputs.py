"""Inputs and outputs as clients write them: bytes, INT32, nulls, types, parameters. Oracle: the native API."""

from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.v2_calls import (
    HEADER_LENGTH,
    IDS,
    MIXED,
    declared,
    infer,
    infer_binary,
    outputs,
    raw,
    split,
    tensor,
    vectors_of,
)
from tests.support.open_inference import infer_message
from tests.support.protocols import Clients, RequestRefused, call_grpc, native_bytes
from tests.support.servers import Server


@pytest.mark.parametrize("reverse", [False, True])
def test_json_and_binary_inputs_can_be_mixed(tiny_clients: Clients, reverse: bool) -> None:
    items = list(MIXED.items())[:: -1 if reverse else 1]
    expected = native_bytes(tiny_clients, "bert", MIXED).tobytes()
    for binary in (set[str](), {"input_ids"}, {"offset", "attention_mask"}, {"token_type_ids"}, set(MIXED)):
        inputs = [declared(data, name) if name in binary else tensor(name, data) for name, data in items]
        data = b"".join(raw(data) for name, data in items if name in binary)
        answer = infer_binary(tiny_clients.http, {"inputs": inputs}, data, model="bert")
        assert vectors_of(answer).tobytes() == expected, binary


def test_output_binary_data_overrides_binary_data_output(tiny_clients: Clients) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()
    for whole in (None, False, True):
        more: dict[str, Any] = {} if whole is None else {"parameters": {"binary_data_output": whole}}
        for one in (None, {}, {"binary_data": False}, {"binary_data": True}):
            more["outputs"] = [{"name": "embeddings"} | ({} if one is None else {"parameters": one})]
            response = infer(tiny_clients.http, tensor(), **more)
            assert (HEADER_LENGTH in response.headers) == (one or {}).get("binary_data", bool(whole)), more
            assert vectors_of(response).tobytes() == expected, more


def test_large_response_may_mix_json_and_binary_outputs(model_server: Server) -> None:
    """The length of the text is told before it: it is computed whole, in a thread."""
    ids = np.arange(3000).reshape(100, 30)
    text, data = outputs("token_embeddings", binary_data=False), outputs("embeddings", binary_data=True)
    with httpx.Client(base_url=model_server.address, timeout=60) as client:

        def ask(wanted: list[dict[str, Any]]) -> tuple[Any, bytes]:
            asked = {"inputs": [declared(ids)], "outputs": wanted}
            response = infer_binary(client, asked, raw(ids), model="gpt2-small")
            length = int(response.headers[HEADER_LENGTH])
            return orjson.loads(response.content[:length])["outputs"], response.content[length:]

        documents, vectors = ask(text + data)
        assert [output["shape"] for output in documents] == [[100, 30, 768]] * 2
        assert (
            np.array(documents[0]["data"], np.float32).tobytes()
            == ask(outputs("token_embeddings", binary_data=True))[1]
        )
        assert vectors == ask(data)[1]


def test_raw_body_is_one_row_with_binary_response(tiny_clients: Clients) -> None:
    headers = {HEADER_LENGTH: "0", "Content-Type": "application/octet-stream"}
    document, content = split(tiny_clients.http.post("/v2/models/gpt/infer", content=raw([1, 2, 3]), headers=headers))
    assert content.startswith(native_bytes(tiny_clients, "gpt", {"input_ids": [[1, 2, 3]]}).tobytes())
    assert [output["name"] for output in document["outputs"]] == ["embeddings", "token_embeddings"]
    assert (document["outputs"][0]["shape"], "id" in document) == ([1, 3, 4], False)


def test_dtype_parameter_sets_response_datatype(tiny_http: httpx.Client) -> None:
    for datatype, own in (("FP16", False), ("float16", True), ("BF16", True), ("bfloat16", False)):
        dtype, shown = ("float16", "FP16") if datatype in ("FP16", "float16") else ("bfloat16", "BF16")
        headers = {"Accept": "application/octet-stream"}
        expected = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "dtype": dtype}, headers=headers).content
        more: dict[str, Any] = {"parameters": {"dtype": datatype, "binary_data_output": True}}
        if own:
            more = {"outputs": outputs("embeddings", dtype=datatype, binary_data=True)}
        document, content = split(infer(tiny_http, tensor(), **more))
        assert (document["outputs"][0]["datatype"], content) == (shown, expected)
        assert document["outputs"][0]["parameters"]["binary_data_size"] == len(expected)
    answer = infer(tiny_http, tensor(), parameters={"dtype": "FP16"}, outputs=outputs("embeddings", dtype="FP32"))
    assert answer.json()["outputs"][0]["datatype"] == "FP32"


def test_int32_ids_are_accepted_beside_int64(tiny_clients: Clients) -> None:
    """Bodies of INT64 and INT32 ids take turns, because a cached layout must not read one as the other."""
    for ids in ([[1, 2], [3, 4]], [[4, 3], [2, 1]]):
        expected = native_bytes(tiny_clients, "gpt", {"input_ids": ids}).tobytes()
        assert vectors_of(infer(tiny_clients.http, tensor(data=ids, datatype="INT32"))).tobytes() == expected
        for datatype, code in (("INT32", "<i4"), ("INT64", "<i8"), ("INT32", "<i4")):
            data = np.array(ids, code).tobytes()
            given = declared(ids, binary_data_size=len(data)) | {"datatype": datatype}
            asked = {"inputs": [given], "parameters": {"binary_data_output": True}}
            assert vectors_of(infer_binary(tiny_clients.http, asked, data)).tobytes() == expected


@pytest.mark.parametrize("raw_contents", [False, True])
def test_int32_ids_over_grpc_are_accepted(tiny_clients: Clients, raw_contents: bool) -> None:
    for ids in ([[1, 2]], [[3, 4]], [[1, 2]]):
        message = service_pb2.ModelInferRequest(model_name="gpt", outputs=outputs("embeddings"))
        given = message.inputs.add(name="input_ids", datatype="INT32", shape=[1, 2])
        if raw_contents:
            message.raw_input_contents.append(np.array(ids, "<i4").tobytes())
        else:
            given.contents.int_contents.extend(ids[0])
        answer = call_grpc(tiny_clients, "ModelInfer", message)
        # As in Triton, the answer to typed contents is raw.
        assert list(answer.raw_output_contents) == [native_bytes(tiny_clients, "gpt", {"input_ids": ids}).tobytes()]
        assert not answer.outputs[0].HasField("contents")


def test_zero_inputs_of_perf_analyzer_are_accepted(tiny_http: httpx.Client) -> None:
    """perf_analyzer without a data file sends all declared inputs, and requests all declared outputs."""
    metadata = tiny_http.get("/v2/models/gpt").json()
    config = tiny_http.get("/v2/models/gpt/config").json()["input"]
    assert [described["name"] for described in config] == [described["name"] for described in metadata["inputs"]]
    inputs = []
    for described in metadata["inputs"]:
        shape = [1 if size == -1 else size for size in described["shape"]]
        inputs.append(described | {"shape": shape, "parameters": {"binary_data_size": 8}})
    wanted = outputs(*(output["name"] for output in metadata["outputs"]), binary_data=True)
    answer = infer_binary(tiny_http, {"inputs": inputs, "outputs": wanted}, bytes(8 * len(inputs)))
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/octet-stream"), answer.text


NULLS: list[dict[str, Any]] = [
    {"parameters": None},
    {"id": None, "model_name": None, "parameters": {}},
    {"parameters": dict.fromkeys(("offset", "dtype", "sequence_id", "binary_data_output", "priority"))},
    {"parameters": {"headers": None, "unknown": None}},
    {"outputs": [{"name": "embeddings", "parameters": None}]},
    {"outputs": outputs("embeddings", binary_data=None, dtype=None)},
    {"inputs": [tensor(parameters=None)]},
    {"inputs": [tensor(parameters={"binary_data_size": None, "content_type": None})]},
    {"field": None},
]


def test_null_field_counts_as_absent(tiny_clients: Clients) -> None:
    http = tiny_clients.http
    plain = infer(http, tensor())
    for nulls in NULLS:
        response = infer(http, tensor(), **nulls)
        assert (response.status_code, response.json()) == (200, plain.json()), nulls
    assert vectors_of(infer_binary(http, {"inputs": [declared(IDS) | {"data": None}]}, raw(IDS))).tobytes() == (
        vectors_of(plain).tobytes()
    )
    message = infer_message([[1, 2]])
    expected = call_grpc(tiny_clients, "ModelInfer", message)
    for name in ("offset", "dtype", "headers"):
        message.parameters[name].SetInParent()
    assert call_grpc(tiny_clients, "ModelInfer", message) == expected


def test_ignored_parameters_are_named_in_the_response(tiny_http: httpx.Client) -> None:
    unknown = {"max_tokens": 5, "temperature": 0.5, "nested": {"a": [1]}, "timeout": 1}
    given, wanted = tensor(parameters={"scale": 2.5}), outputs("embeddings", layout="x")
    document = infer(tiny_http, given, outputs=wanted, parameters=unknown).json()
    named = "max_tokens, temperature, nested, timeout, inputs[0].parameters.scale, outputs[0].parameters.layout"
    assert document.pop("parameters") == {"ignored_parameters": named}
    assert document == infer(tiny_http, tensor()).json()
    for _ in range(3):  # later ones are prepared
        asked = {"inputs": [declared(IDS)], "parameters": {"binary_data_output": True, "max_tokens": 5}}
        header, _ = split(infer_binary(tiny_http, asked, raw(IDS)))
        assert header["parameters"] == {"ignored_parameters": "max_tokens"}


def test_offset_parameter_is_accepted(tiny_clients: Clients) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": 2}).tobytes()
    for further in ({}, {"priority": 3, "timeout": 5, "content_type": "np"}):
        answer = infer(tiny_clients.http, tensor(), parameters={"offset": 2} | further)
        assert vectors_of(answer).tobytes() == expected


def test_wrong_binary_size_over_grpc_is_rejected(tiny_clients: Clients) -> None:
    message = infer_message([[0, 0]])
    for size in (8, 24):
        message.inputs[0].parameters["binary_data_size"].int64_param = size
        with pytest.raises(RequestRefused, match=rf"binary_data_size: got {size}, expected 16, the bytes of its"):
            call_grpc(tiny_clients, "ModelInfer", message)
    message.inputs[0].parameters["binary_data_size"].int64_param = 16
    assert call_grpc(tiny_clients, "ModelInfer", message).outputs[0].shape == [1, 2, 4]
