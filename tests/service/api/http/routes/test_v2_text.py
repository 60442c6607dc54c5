"""Text and row outputs over the Open Inference Protocol. Oracles: tritonclient, and the native and OpenAI APIs."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.v2_calls import IDS, declared, error_of, infer, infer_binary, raw, tensor
from tests.support.protocols import Clients, RequestRefused, call_grpc
from tests.support.servers import Server

TEXTS = ["Hello, world!", "Ünïcödé 😀 naïve café"]
EQUAL = ["one two", "two one"]
ROWS = ("embeddings", "lengths", "next_offset", "truncated", "input_ids", "spans")
NATIVE = {"return_tokens": True, "truncate": "left"}


@pytest.fixture(scope="module")
def triton(model_server: Server) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(model_server.address.removeprefix("http://")) as client:
        yield client


def native(client: httpx.Client, **fields: Any) -> dict[str, NDArray[Any]]:
    """Return the outputs of the native API under the same names, of concatenated rows."""
    answer = client.post("/models/minilm/embed", json=fields | NATIVE).raise_for_status().json()
    values = np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])
    tokens = {name: np.concatenate([np.array(row) for row in answer[name]]) for name in ("input_ids", "spans")}
    lengths = np.array([len(row) for row in answer["input_ids"]])
    rows = {name: np.array(answer[name]) for name in ("next_offset", "truncated")}
    return {"embeddings": values, "lengths": lengths, **rows, **tokens}


def names(*outputs: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in outputs]


def arrays_of(response: httpx.Response) -> dict[str, NDArray[Any]]:
    assert response.status_code == 200, response.text
    kinds = {"FP32": np.float32, "INT64": np.int64}
    return {
        output["name"]: np.array(output["data"], kinds[output["datatype"]]).reshape(output["shape"])
        for output in response.json()["outputs"]
    }


def same(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> bool:
    return list(found) == list(ROWS) and all(
        np.array_equal(found[name].reshape(expected[name].shape), expected[name]) for name in ROWS
    )


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], EQUAL])
@pytest.mark.parametrize("binary", [False, True])
def test_text_from_tritonclient_over_http_equals_native(
    triton: Any, model_http: httpx.Client, texts: list[str], binary: bool
) -> None:
    given = tritonclient.http.InferInput("text", [len(texts)], "BYTES")
    given.set_data_from_numpy(np.array([text.encode() for text in texts], object), binary_data=binary)
    wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in ROWS]
    result = triton.infer("minilm", [given], outputs=wanted, parameters={"truncate": "left"})
    assert same({name: result.as_numpy(name) for name in ROWS}, native(model_http, text=texts))
    rows = (len(texts), result.as_numpy("lengths")[0])
    equal = len(set(result.as_numpy("lengths"))) == 1
    assert result.as_numpy("input_ids").shape == (rows if equal else (sum(result.as_numpy("lengths")),))
    assert result.as_numpy("spans").shape[:-1] == result.as_numpy("embeddings").shape[:-1]


@pytest.mark.parametrize("raw_contents", [False, True])
def test_text_over_grpc_equals_native(model_clients: Clients, raw_contents: bool) -> None:
    message = service_pb2.ModelInferRequest(model_name="minilm", outputs=names(*ROWS))
    message.parameters["truncate"].string_param = "left"
    given = message.inputs.add(name="text", datatype="BYTES", shape=[2])
    texts = [text.encode() for text in TEXTS]
    if raw_contents:
        message.raw_input_contents.append(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
    else:
        given.contents.bytes_contents.extend(texts)
    answer = call_grpc(model_clients, "ModelInfer", message)
    found = {
        output.name: np.frombuffer(data, np.float32 if output.datatype == "FP32" else np.int64)
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    assert same(found, native(model_clients.http, text=TEXTS))


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_equals_openai_api(model_http: httpx.Client, pooling: str) -> None:
    document = {"model": "minilm", "input": TEXTS, "encoding_format": "base64", "pooling": pooling}
    data = model_http.post("/v1/embeddings", json=document).raise_for_status().json()["data"]
    expected = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]
    text = tensor("text", TEXTS, datatype="BYTES")
    found = arrays_of(infer(model_http, text, model="minilm", parameters={"pooling": pooling}))
    assert np.array_equal(found["embeddings"], np.stack(expected))
    tokens = native(model_http, text=TEXTS)
    ids = np.split(tokens["input_ids"], np.cumsum(tokens["lengths"])[:-1])
    rows = [
        infer(model_http, tensor(data=[row.tolist()]), model="minilm", parameters={"pooling": pooling}) for row in ids
    ]
    assert [arrays_of(row)["embeddings"].tobytes() for row in rows] == [vector.tobytes() for vector in expected]


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_row_is_truncated_on_request(tiny_http: httpx.Client, side: str) -> None:
    ids = [[1, 2, 3, 4, 5, 6, 1, 2]]
    expected = tiny_http.post(
        "/models/gpt/embed", json={"input_ids": ids, "truncate": side, "encoding": "float"}
    ).json()
    outputs = names("embeddings", "truncated", "lengths")
    found = arrays_of(infer(tiny_http, tensor(data=ids), outputs=outputs, parameters={"truncate": side}))
    assert np.array_equal(found["embeddings"], np.array(expected["embeddings"], np.float32))
    assert (found["truncated"].tolist(), found["lengths"].tolist()) == (expected["truncated"], [6])


def test_next_offset_continues_the_rows(tiny_http: httpx.Client) -> None:
    """The header repeats with other offsets, so a cached response would give a wrong output."""
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("embeddings", "next_offset")]
    offset, steps = np.zeros(2, np.int64), []
    for step in np.array(IDS).T.reshape(3, 2, 1):
        asked = {"inputs": [declared(step), declared(offset, "offset")], "outputs": outputs}
        answer = infer_binary(tiny_http, asked, raw(step) + raw(offset))
        assert answer.status_code == 200
        offset = np.frombuffer(answer.content[-16:], "<i8")
        steps.append(np.frombuffer(answer.content[-16 - 32 : -16], "<f4").reshape(2, 1, 4))
    assert offset.tolist() == [3, 3]
    whole = arrays_of(infer(tiny_http, tensor()))["embeddings"]
    assert np.array_equal(np.concatenate(steps, axis=1), whole)


def test_next_offset_over_grpc_is_not_served_from_cache(tiny_clients: Clients) -> None:
    for ids, mask in (([[1, 2]], None), ([[1, 2]], [[0, 1]]), ([[3, 4]], None)):
        message = service_pb2.ModelInferRequest(model_name="bert", outputs=names("next_offset", "embeddings"))
        for name, value in (("input_ids", ids), ("attention_mask", mask)):
            if value is not None:
                message.inputs.add(name=name, datatype="INT64", shape=[1, 2])
                message.raw_input_contents.append(raw(value))
        answer = call_grpc(tiny_clients, "ModelInfer", message)
        assert [output.name for output in answer.outputs] == ["next_offset", "embeddings"]
        assert np.frombuffer(answer.raw_output_contents[0], "<i8").tolist() == [2 if mask is None else 1]


TEXT = tensor("text", ["a"], datatype="BYTES")
BAD: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("gpt", [TEXT], {}, "inputs.name: got text"),
    ("bert", [TEXT, tensor()], {}, "input_ids cannot be used with text"),
    ("bert", [TEXT, tensor("attention_mask", [[1]])], {}, "attention_mask cannot be used with text"),
    ("bert", [TEXT, TEXT], {}, "inputs.name: got text twice"),
    ("bert", [tensor("text", [["a"]], datatype="BYTES")], {}, "text.shape: got [1, 1]"),
    ("bert", [tensor("text", ["a"], datatype="INT64")], {}, "text.datatype: got INT64"),
    ("bert", [tensor("text", ["a"], datatype="BYTES", shape=[2])], {}, "text.data: got 1 values"),
    ("bert", [tensor("text", [""], datatype="BYTES")], {}, "text[0]: got ''"),
    ("bert", [tensor("text", [5], datatype="BYTES")], {}, "text[0]: got 5"),
    ("bert", [tensor("text", [], datatype="BYTES", shape=[0])], {}, "text.shape: got [0]"),
    ("bert", [TEXT], {"parameters": {"sequence_id": 5}}, "parameters.sequence_id: got 5"),
    ("bert", [TEXT], {"parameters": {"truncate": ["left"]}}, "truncate: got ['left']"),
    ("bert", [tensor()], {"outputs": names("embeddings", "spans")}, "outputs: spans needs the input text, because it"),
    ("bert", [tensor()], {"outputs": names("lengths")}, "outputs: got lengths"),
    ("bert", [], {}, "inputs: got no input_ids"),
]


@pytest.mark.parametrize(("model", "inputs", "more", "error"), BAD, ids=range(len(BAD)))
def test_bad_text_request_is_400(
    tiny_http: httpx.Client, model: str, inputs: list[Any], more: dict[str, Any], error: str
) -> None:
    response = infer(tiny_http, *inputs, model=model, **more)
    assert (response.status_code, error_of(response)[: len(error)]) == (400, error)


BYTES = [
    (b"", "text: got 0 bytes for 0 texts"),
    (b"\x02\0\0\0a", "text: got 5 bytes for 0 texts"),
    (b"\xff\xff\xff\xffa", "text: got 5 bytes for 0 texts"),
    (b"\x01\0\0\0ab", "text: got 1 bytes more"),
    (b"\x01\0\0\0\xff", "text[0]: got b'\\xff'"),
]


@pytest.mark.parametrize(("data", "error"), BYTES, ids=range(len(BYTES)))
def test_malformed_text_bytes_are_rejected(tiny_clients: Clients, data: bytes, error: str) -> None:
    given = {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    response = infer_binary(tiny_clients.http, {"inputs": [given]}, data, model="bert")
    told = error_of(response)
    assert (response.status_code, told[: len(error)]) == (400, error)
    message = service_pb2.ModelInferRequest(model_name="bert", raw_input_contents=[data])
    message.inputs.add(name="text", datatype="BYTES", shape=[1])
    with pytest.raises(RequestRefused) as refused:
        call_grpc(tiny_clients, "ModelInfer", message)
    assert (refused.value.status, refused.value.message) == ("StatusCode.INVALID_ARGUMENT", told)
