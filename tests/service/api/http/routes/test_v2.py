"""The Open Inference Protocol over HTTP, and the same documents over gRPC. Oracles: tritonclient, the other APIs."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http
from google.protobuf.json_format import ParseDict
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2

from preblock.service.app import VERSION
from tests.service.api.http.routes.v2_calls import (
    IDS,
    MIXED,
    NUMPY_TYPES,
    arrays_of,
    declared,
    error_of,
    infer,
    infer_binary,
    outputs,
    raw,
    split,
    tensor,
    texts,
    vectors_of,
)
from tests.support.open_inference import HEADER_LENGTH, infer_message
from tests.support.protocols import Clients, RequestRefused, call_grpc, native_bytes
from tests.support.servers import Server

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "parameters"]
EXTENSIONS += ["sequence", "sequence(string_id)", "statistics"]


@pytest.fixture(scope="module")
def triton(tiny_server: Server) -> Iterator[Any]:
    """tritonclient over HTTP."""
    with tritonclient.http.InferenceServerClient(tiny_server.address.removeprefix("http://")) as client:
        yield client


def test_server_and_model_are_ready_only_if_served(triton: Any, tiny_clients: Clients) -> None:
    expected = {"name": "preblock", "version": VERSION, "extensions": EXTENSIONS}
    assert triton.get_server_metadata() == tiny_clients.grpc.get_server_metadata(as_json=True) == expected
    for client in (triton, tiny_clients.grpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        for model, version in (("bert", ""), ("bert", "1"), ("bert", "2"), ("gpt", "1")):
            assert client.is_model_ready(model, version), (client, model, version)
        for model, version in (("nope", ""), ("bert", "3"), ("bert", "0")):
            assert not client.is_model_ready(model, version), (client, model, version)
    assert tiny_clients.http.get("/v2/health/live").json() == {"live": True}
    assert tiny_clients.http.get("/v2/health/ready").json() == {"ready": True}
    assert tiny_clients.http.get("/v2/models").json() == {"models": ["bert", "gpt"]}


def test_model_metadata_describes_every_tensor(triton: Any, tiny_clients: Clients) -> None:
    ids = ("input_ids", "token_type_ids", "attention_mask")
    whole = triton.get_model_metadata("bert")
    assert whole == {
        "name": "bert",
        "versions": ["1", "2"],
        "platform": "onnx_onnxv1",
        "inputs": [
            *({"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ids),
            {"name": "offset", "datatype": "INT64", "shape": [-1]},
            {"name": "text", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [-1, -1, 4]} for name in ("embeddings", "token_embeddings")
        ],
    }
    assert triton.get_model_metadata("bert", "1") == whole | {"versions": ["1"]}
    for model, version in (("bert", ""), ("bert", "1"), ("gpt", "")):
        told, http = tiny_clients.grpc.get_model_metadata(model, version), triton.get_model_metadata(model, version)
        assert told == ParseDict(http, service_pb2.ModelMetadataResponse())


def test_model_config_names_optional_inputs(tiny_clients: Clients) -> None:
    for model, needed in (("bert", []), ("gpt", ["input_ids"])):  # bert takes ids or text
        http = tiny_clients.http.get(f"/v2/models/{model}/config").json()
        assert [described["name"] for described in http["input"] if not described["optional"]] == needed
        assert tiny_clients.grpc.get_model_config(model).config == ParseDict(http, model_config_pb2.ModelConfig())


def test_statistics_list_batches_up_to_64_rows(tiny_http: httpx.Client) -> None:
    for rows in (64, 65, 70):
        tiny_http.post("/models/gpt/embed", json={"input_ids": [[1]] * rows})
    (stats,) = tiny_http.get("/v2/models/gpt/stats").json()["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    assert max(sizes) == 64
    assert stats["execution_count"] >= sum(sizes.values()) + 2


def test_unknown_v2_path_has_an_error_of_the_protocol(tiny_http: httpx.Client) -> None:
    for path in ("models/nope/ready", "models/bert/versions/3", "nope"):
        response = tiny_http.get(f"/v2/{path}")
        assert (response.status_code, bool(error_of(response))) == (404, True), path
    response = tiny_http.get("/v2/models/bert/infer")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST, OPTIONS")
    assert error_of(response) == "GET /v2/models/bert/infer: Method Not Allowed, expected POST"


def test_json_data_may_be_nested_or_flat(tiny_clients: Clients) -> None:
    for data in (IDS, [1, 2, 3, 4, 5, 6]):
        response = infer(tiny_clients.http, tensor(data=data, shape=[2, 3]))
        assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()
        assert response.json()["outputs"][0]["shape"] == [2, 3, 4]


def test_response_names_request_and_version(tiny_clients: Clients) -> None:
    tiny_http, found = tiny_clients.http, []
    for id_ in ("7", "", "é\u0000\U0001f600", None):
        document = infer(tiny_http, tensor(), id=id_).json()
        assert (document.get("id"), "id" in document) == (id_, id_ is not None)
    newest = infer(tiny_http, tensor(), model="bert").json()
    for version in (1, 2):
        document = infer(tiny_http, tensor(), model=f"bert/versions/{version}").json()
        assert (document["model_name"], document["model_version"]) == ("bert", str(version))
        assert (document["outputs"] == newest["outputs"]) == (version == 2)
        message = infer_message(IDS, "bert", id="7", model_version=str(version))
        answer = call_grpc(tiny_clients, "ModelInfer", message)
        assert (answer.model_name, answer.model_version, answer.id) == ("bert", str(version), "7")
        found += answer.raw_output_contents
    assert found[0] != found[1]


def test_omitted_outputs_default_to_all_declared(tiny_http: httpx.Client) -> None:
    for model in ("bert", "gpt"):
        declared = [output["name"] for output in tiny_http.get(f"/v2/models/{model}").json()["outputs"]]
        named = infer(tiny_http, tensor(), model=model, outputs=outputs(*declared)).json()
        assert [output["name"] for output in named["outputs"]] == declared == ["embeddings", "token_embeddings"]
        for omitted in (list[Any](), None):
            assert infer(tiny_http, tensor(), model=model, outputs=omitted).json() == named


def test_json_and_binary_inputs_can_be_mixed(tiny_clients: Clients) -> None:
    items = [*MIXED.items()][::-1]
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


def test_large_response_may_mix_json_and_binary_outputs(model_http: httpx.Client) -> None:
    """The length of the text is told before it: it is computed whole, in a thread."""
    ids = np.arange(3000).reshape(100, 30)
    text, data = outputs("token_embeddings", binary_data=False), outputs("embeddings", binary_data=True)

    def ask(wanted: list[dict[str, Any]]) -> tuple[Any, bytes]:
        asked = {"inputs": [declared(ids)], "outputs": wanted}
        document, content = split(infer_binary(model_http, asked, raw(ids), model="gpt2-small"))
        return document["outputs"], content

    documents, vectors = ask(text + data)
    assert [output["shape"] for output in documents] == [[100, 30, 768]] * 2
    _, expected = ask(outputs("token_embeddings", binary_data=True))
    assert np.array(documents[0]["data"], np.float32).tobytes() == expected
    assert vectors == ask(data)[1]


def test_raw_body_is_one_row_with_binary_response(tiny_clients: Clients) -> None:
    headers = {HEADER_LENGTH: "0", "Content-Type": "application/octet-stream"}
    document, content = split(tiny_clients.http.post("/v2/models/gpt/infer", content=raw([1, 2, 3]), headers=headers))
    assert content.startswith(native_bytes(tiny_clients, "gpt", {"input_ids": [[1, 2, 3]]}).tobytes())
    assert [output["name"] for output in document["outputs"]] == ["embeddings", "token_embeddings"]
    assert (document["outputs"][0]["shape"], "id" in document) == ([1, 3, 4], False)


def test_dtype_parameter_sets_response_datatype(tiny_http: httpx.Client) -> None:
    headers = {"Accept": "application/octet-stream"}
    for datatype, dtype, shown in (("FP16", "float16", "FP16"), ("bfloat16", "bfloat16", "BF16")):
        expected = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, "dtype": dtype}, headers=headers).content
        whole = {"parameters": {"dtype": datatype, "binary_data_output": True}}
        for more in (whole, {"outputs": outputs("embeddings", dtype=datatype, binary_data=True)}):
            document, content = split(infer(tiny_http, tensor(), **more))
            assert (document["outputs"][0]["datatype"], content) == (shown, expected)
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


def test_all_declared_tensors_may_be_asked_at_once(tiny_http: httpx.Client) -> None:
    """perf_analyzer without a data file sends all declared inputs, and requests all declared outputs."""
    metadata = tiny_http.get("/v2/models/gpt").json()
    size = {"parameters": {"binary_data_size": 8}}
    inputs = [given | size | {"shape": [abs(length) for length in given["shape"]]} for given in metadata["inputs"]]
    wanted = outputs(*(output["name"] for output in metadata["outputs"]), binary_data=True)
    answer = infer_binary(tiny_http, {"inputs": inputs, "outputs": wanted}, bytes(8 * len(inputs)))
    assert answer.status_code == 200, answer.text


NULL_PARAMETERS = ("offset", "dtype", "sequence_id", "binary_data_output", "priority", "headers", "unknown")
NULLS: list[dict[str, Any]] = [
    {"id": None, "model_name": None, "field": None, "parameters": None},
    {"parameters": dict.fromkeys(NULL_PARAMETERS)},
    {"outputs": [{"name": "embeddings", "parameters": None}]},
    {"outputs": outputs("embeddings", binary_data=None, dtype=None)},
    {"inputs": [tensor(parameters=None)]},
    {"inputs": [tensor(parameters={"binary_data_size": None, "content_type": None})]},
]


def test_null_field_counts_as_absent(tiny_clients: Clients) -> None:
    http = tiny_clients.http
    plain = infer(http, tensor())
    for nulls in NULLS:
        response = infer(http, tensor(), **nulls)
        assert (response.status_code, response.json()) == (200, plain.json()), nulls
    binary = infer_binary(http, {"inputs": [declared(IDS) | {"data": None}]}, raw(IDS))
    assert vectors_of(binary).tobytes() == vectors_of(plain).tobytes()
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


def test_wrong_binary_size_over_grpc_is_rejected(tiny_clients: Clients) -> None:
    message = infer_message([[0, 0]])
    for size in (8, 24):
        message.inputs[0].parameters["binary_data_size"].int64_param = size
        with pytest.raises(RequestRefused, match=rf"binary_data_size: got {size}, expected 16, the bytes of its"):
            call_grpc(tiny_clients, "ModelInfer", message)
    message.inputs[0].parameters["binary_data_size"].int64_param = 16
    assert call_grpc(tiny_clients, "ModelInfer", message).outputs[0].shape == [1, 2, 4]


TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café"]
ROWS = ("embeddings", "lengths", "next_offset", "truncated", "input_ids", "spans")


def native(client: httpx.Client, **fields: Any) -> dict[str, NDArray[Any]]:
    """Return the outputs of the native API under the same names, of concatenated rows."""
    asked = fields | {"return_tokens": True, "truncate": "left"}
    answer = client.post("/models/minilm/embed", json=asked).raise_for_status().json()
    values = np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])
    tokens = {name: np.concatenate([np.array(row) for row in answer[name]]) for name in ("input_ids", "spans")}
    lengths = np.array([len(row) for row in answer["input_ids"]])
    rows = {name: np.array(answer[name]) for name in ("next_offset", "truncated")}
    return {"embeddings": values, "lengths": lengths, **rows, **tokens}


def check(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert list(found) == list(ROWS)
    for name in ROWS:
        assert np.array_equal(found[name].reshape(expected[name].shape), expected[name]), name


@pytest.mark.parametrize("given", [TEXTS, TEXTS[:1], ["one two", "two one"]])
@pytest.mark.parametrize("binary", [False, True])
def test_text_from_tritonclient_over_http_equals_native(
    model_http: httpx.Client, given: list[str], binary: bool
) -> None:
    text = tritonclient.http.InferInput("text", [len(given)], "BYTES")
    text.set_data_from_numpy(np.array([row.encode() for row in given], object), binary_data=binary)
    wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in ROWS]
    with tritonclient.http.InferenceServerClient(model_http.base_url.netloc.decode()) as triton:
        result = triton.infer("minilm", [text], outputs=wanted, parameters={"truncate": "left"})
    check({name: result.as_numpy(name) for name in ROWS}, native(model_http, text=given))
    lengths = result.as_numpy("lengths").tolist()
    shape = (len(given), lengths[0]) if len(set(lengths)) == 1 else (sum(lengths),)
    assert result.as_numpy("spans").shape[:-1] == result.as_numpy("input_ids").shape == shape


def test_text_over_grpc_equals_native(model_clients: Clients) -> None:
    message = service_pb2.ModelInferRequest(model_name="minilm", outputs=outputs(*ROWS))
    message.parameters["truncate"].string_param = "left"
    given = message.inputs.add(name="text", datatype="BYTES", shape=[2])
    given.contents.bytes_contents.extend(text.encode() for text in TEXTS)
    answer = call_grpc(model_clients, "ModelInfer", message)
    found = {
        output.name: np.frombuffer(data, NUMPY_TYPES[output.datatype])
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    check(found, native(model_clients.http, text=TEXTS))


def test_pooling_equals_openai_api(model_http: httpx.Client) -> None:
    for pooling in ("mean", "last"):
        document = {"model": "minilm", "input": TEXTS, "encoding_format": "base64", "pooling": pooling}
        data = model_http.post("/v1/embeddings", json=document).raise_for_status().json()["data"]
        answer = infer(model_http, texts(TEXTS), model="minilm", parameters={"pooling": pooling})
        expected = b"".join(base64.b64decode(item["embedding"]) for item in data)
        assert arrays_of(answer)["embeddings"].tobytes() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_row_is_truncated_on_request(tiny_http: httpx.Client, side: str) -> None:
    ids = [[1, 2, 3, 4, 5, 6, 1, 2]]
    fields = {"input_ids": ids, "truncate": side, "encoding": "float"}
    expected = tiny_http.post("/models/gpt/embed", json=fields).json()
    wanted = outputs("embeddings", "truncated", "lengths")
    found = arrays_of(infer(tiny_http, tensor(data=ids), outputs=wanted, parameters={"truncate": side}))
    assert np.array_equal(found["embeddings"], np.array(expected["embeddings"], np.float32))
    assert (found["truncated"].tolist(), found["lengths"].tolist()) == (expected["truncated"], [6])


def test_next_offset_continues_the_rows(tiny_http: httpx.Client) -> None:
    """The header repeats with other offsets, so a cached response would give a wrong output."""
    offset, steps = np.zeros(2, np.int64), []
    for step in np.array(IDS).T.reshape(3, 2, 1):
        wanted = outputs("embeddings", "next_offset", binary_data=True)
        asked = {"inputs": [declared(step), declared(offset, "offset")], "outputs": wanted}
        _, content = split(infer_binary(tiny_http, asked, raw(step) + raw(offset)))
        offset = np.frombuffer(content[-16:], "<i8")
        steps.append(np.frombuffer(content[:-16], "<f4").reshape(2, 1, 4))
    assert offset.tolist() == [3, 3]
    assert np.array_equal(np.concatenate(steps, axis=1), arrays_of(infer(tiny_http, tensor()))["embeddings"])


def test_next_offset_over_grpc_is_not_served_from_cache(tiny_clients: Clients) -> None:
    for ids, mask in (([[1, 2]], None), ([[1, 2]], [[0, 1]]), ([[3, 4]], None)):
        message = service_pb2.ModelInferRequest(model_name="bert", outputs=outputs("next_offset", "embeddings"))
        for name, value in (("input_ids", ids), ("attention_mask", mask)):
            if value is not None:
                message.inputs.add(name=name, datatype="INT64", shape=[1, 2])
                message.raw_input_contents.append(raw(value))
        answer = call_grpc(tiny_clients, "ModelInfer", message)
        assert [output.name for output in answer.outputs] == ["next_offset", "embeddings"]
        assert np.frombuffer(answer.raw_output_contents[0], "<i8").tolist() == [2 if mask is None else 1]
