"""Text and row outputs over the Open Inference Protocol. Oracles: tritonclient, and the native and OpenAI APIs."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.v2_calls import (
    IDS,
    NUMPY_TYPES,
    arrays_of,
    declared,
    infer,
    infer_binary,
    outputs,
    raw,
    split,
    tensor,
    texts,
)
from tests.support.protocols import Clients, call_grpc

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
    assert result.as_numpy("input_ids").shape == shape
    assert result.as_numpy("spans").shape[:-1] == result.as_numpy("embeddings").shape[:-1] == shape


@pytest.mark.parametrize("raw_contents", [False, True])
def test_text_over_grpc_equals_native(model_clients: Clients, raw_contents: bool) -> None:
    message = service_pb2.ModelInferRequest(model_name="minilm", outputs=outputs(*ROWS))
    message.parameters["truncate"].string_param = "left"
    given = message.inputs.add(name="text", datatype="BYTES", shape=[2])
    encoded = [text.encode() for text in TEXTS]
    if raw_contents:
        message.raw_input_contents.append(b"".join(len(text).to_bytes(4, "little") + text for text in encoded))
    else:
        given.contents.bytes_contents.extend(encoded)
    answer = call_grpc(model_clients, "ModelInfer", message)
    found = {
        output.name: np.frombuffer(data, NUMPY_TYPES[output.datatype])
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
    check(found, native(model_clients.http, text=TEXTS))


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_equals_openai_api(model_http: httpx.Client, pooling: str) -> None:
    document = {"model": "minilm", "input": TEXTS, "encoding_format": "base64", "pooling": pooling}
    data = model_http.post("/v1/embeddings", json=document).raise_for_status().json()["data"]
    expected = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data])
    tokens = native(model_http, text=TEXTS)
    rows = np.split(tokens["input_ids"], np.cumsum(tokens["lengths"])[:-1])
    of_ids = [tensor(data=[row.tolist()]) for row in rows]
    for given, vectors in ((texts(TEXTS), expected), *zip(of_ids, expected, strict=True)):
        answer = infer(model_http, given, model="minilm", parameters={"pooling": pooling})
        assert arrays_of(answer)["embeddings"].tobytes() == vectors.tobytes()


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
