"""The Open Inference Protocol over HTTP. Oracles: tritonclient, and the native API."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.http

from tests.support.protocols import Clients, Vectors, native_bytes
from tests.support.servers import Server

HEADER_LENGTH = "Inference-Header-Content-Length"
IDS = [[1, 2, 3], [4, 5, 6]]
OUTPUTS = "embeddings, token_embeddings, lengths, next_offset, truncated, input_ids, spans, each once"


def tensor(name: Any = "input_ids", data: Any = IDS, **more: Any) -> dict[str, Any]:
    """Return an input with JSON data."""
    shape = more["shape"] if "shape" in more else np.array(data).shape
    return {"name": name, "datatype": "INT64", "data": data} | more | {"shape": shape}


def declared(array: Any, name: str = "input_ids", **more: Any) -> dict[str, Any]:
    """Return an input whose data are bytes after the JSON."""
    size = np.array(array, "<i8").nbytes
    return {"name": name, "datatype": "INT64", "shape": np.array(array).shape} | {
        "parameters": {"binary_data_size": size} | more
    }


def raw(array: Any) -> bytes:
    return np.array(array, "<i8").tobytes()


def infer(client: httpx.Client, *inputs: Any, model: str = "gpt", **more: Any) -> httpx.Response:
    document = {"inputs": inputs, "outputs": [{"name": "embeddings"}]} | more
    return client.post(f"/v2/models/{model}/infer", json=document)


def infer_binary(
    client: httpx.Client, document: dict[str, Any], data: bytes, length: str | None = None, model: str = "gpt"
) -> httpx.Response:
    header = json.dumps({"outputs": [{"name": "embeddings"}]} | document).encode()
    headers = {
        HEADER_LENGTH: str(len(header)) if length is None else length,
        "Content-Type": "application/octet-stream",
    }
    return client.post(f"/v2/models/{model}/infer", content=header + data, headers=headers)


def vectors_of(response: httpx.Response) -> Vectors:
    """Return the vectors (T, D) of either form of answer."""
    assert response.status_code == 200, response.text
    length = response.headers.get(HEADER_LENGTH)
    document = json.loads(response.content[: None if length is None else int(length)])
    output = document["outputs"][0]
    assert (output["name"], output["datatype"]) == ("embeddings", "FP32")
    if length is None:
        assert response.headers["Content-Type"] == "application/json"
        return np.array(output["data"], np.float32).reshape(-1, output["shape"][-1])
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert output["parameters"] == {"binary_data_size": len(response.content) - int(length)}
    assert "data" not in output
    return np.frombuffer(response.content[int(length) :], "<f4").reshape(-1, output["shape"][-1])


def error_of(response: httpx.Response) -> str:
    assert 400 <= response.status_code < 500
    assert response.headers["Content-Type"] == "application/json"
    document = response.json()
    assert list(document) == ["error"]
    return str(document["error"])


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


def test_live_and_ready(triton: Any, tiny: httpx.Client) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert tiny.get("/v2/health/live").json() == {"live": True}
    assert tiny.get("/v2/health/ready").json() == {"ready": True}


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [("bert", "", True), ("bert", "1", True), ("bert", "2", True), ("bert", "3", False), ("nope", "", False)],
)
def test_a_model_that_is_served_is_ready(triton: Any, model: str, version: str, ready: bool) -> None:
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


def test_metadata_of_a_version_names_that_version(triton: Any) -> None:
    assert triton.get_model_metadata("bert", "1")["versions"] == ["1"]


def test_a_model_without_segments_has_no_input_for_them(triton: Any) -> None:
    inputs = [described["name"] for described in triton.get_model_metadata("gpt")["inputs"]]
    assert inputs == ["input_ids", "attention_mask", "offset"]


@pytest.mark.parametrize("path", ["/v2/models/nope", "/v2/models/nope/ready", "/v2/models/bert/versions/3", "/v2/nope"])
def test_what_does_not_exist_is_404(tiny: httpx.Client, path: str) -> None:
    response = tiny.get(path)
    assert response.status_code == 404
    assert error_of(response)


def test_another_method_is_405(tiny: httpx.Client) -> None:
    response = tiny.get("/v2/models/bert/infer")
    assert response.status_code == 405
    assert response.headers["Allow"] == "POST, OPTIONS"
    assert error_of(response) == "GET /v2/models/bert/infer: Method Not Allowed"


@pytest.mark.parametrize(
    "data",
    [IDS, [1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6]], [[[1], [2], [3]], [[4], [5], [6]]]],
    ids=["2D", "flat", "1x6", "3D"],
)
def test_json_data_may_be_nested_or_flat(tiny: httpx.Client, tiny_clients: Clients, data: Any) -> None:
    response = infer(tiny, tensor(data=data, shape=[2, 3]))
    assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()
    assert response.json()["outputs"][0]["shape"] == [2, 3, 4]


@pytest.mark.parametrize("id_", ["7", "", "é\u0000\U0001f600", None])
def test_the_id_is_echoed(tiny: httpx.Client, id_: str | None) -> None:
    document = infer(tiny, tensor(), id=id_).json()
    assert document.get("id") == id_
    assert ("id" in document) == (id_ is not None)


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_can_be_named(tiny: httpx.Client, version: int) -> None:
    document = infer(tiny, tensor(), model=f"bert/versions/{version}").json()
    assert (document["model_name"], document["model_version"]) == ("bert", str(version))
    same = document["outputs"] == infer(tiny, tensor(), model="bert").json()["outputs"]
    assert same == (version == 2)


@pytest.mark.parametrize("offset", [[2], [2, 3]])
def test_an_offset_is_one_or_one_for_each_row(tiny: httpx.Client, tiny_clients: Clients, offset: list[int]) -> None:
    expected = native_bytes(tiny_clients, "gpt", {"input_ids": IDS, "offset": offset})
    assert vectors_of(infer(tiny, tensor(), tensor("offset", offset))).tobytes() == expected.tobytes()


def test_the_order_of_the_inputs_does_not_matter(tiny: httpx.Client) -> None:
    one, other = tensor(), tensor("offset", [3])
    assert infer(tiny, one, other).json() == infer(tiny, other, one).json()


MIXED = {
    "input_ids": IDS,
    "offset": [1, 2],
    "token_type_ids": [[0, 1, 0], [1, 0, 1]],
    "attention_mask": [[0, 1, 1], [1, 1, 0]],
}


@pytest.mark.parametrize(
    "binary", [set[str](), {"input_ids"}, {"offset", "attention_mask"}, {"token_type_ids"}, set(MIXED)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_json_and_binary_inputs_mix(tiny: httpx.Client, tiny_clients: Clients, binary: set[str], reverse: bool) -> None:
    items = list(MIXED.items())[:: -1 if reverse else 1]
    inputs = [declared(data, name) if name in binary else tensor(name, data) for name, data in items]
    data = b"".join(raw(data) for name, data in items if name in binary)
    answer = infer_binary(tiny, {"inputs": inputs}, data, model="bert")
    assert vectors_of(answer).tobytes() == native_bytes(tiny_clients, "bert", MIXED).tobytes()


@pytest.mark.parametrize("padding", range(9))
def test_binary_data_may_begin_at_any_byte(tiny: httpx.Client, tiny_clients: Clients, padding: int) -> None:
    header = json.dumps({"inputs": [declared(IDS)]}).encode() + b" " * padding
    response = tiny.post("/v2/models/gpt/infer", content=header + raw(IDS), headers={HEADER_LENGTH: str(len(header))})
    assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()


@pytest.mark.parametrize("whole", [None, False, True])
@pytest.mark.parametrize("one", [None, {}, {"binary_data": False}, {"binary_data": True}])
def test_binary_data_of_the_output_overrides_binary_data_output(
    tiny: httpx.Client, tiny_clients: Clients, whole: bool | None, one: dict[str, bool] | None
) -> None:
    more: dict[str, Any] = {} if whole is None else {"parameters": {"binary_data_output": whole}}
    if one is not None:
        more["outputs"] = [{"name": "embeddings", "parameters": one}]
    response = infer(tiny, tensor(), **more)
    assert (HEADER_LENGTH in response.headers) == (one or {}).get("binary_data", bool(whole))
    assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()


def test_a_large_answer_may_be_text_and_bytes(server: Server) -> None:
    """The length of the text is told before it: it is computed whole, in a thread."""
    ids = np.arange(3000).reshape(100, 30)
    outputs = [
        {"name": "token_embeddings", "parameters": {"binary_data": False}},
        {"name": "embeddings", "parameters": {"binary_data": True}},
    ]
    with httpx.Client(base_url=server.address, timeout=60) as client:
        answers = []
        for wanted in (outputs, *([output | {"parameters": {"binary_data": True}}] for output in outputs)):
            asked = {"inputs": [declared(ids)], "outputs": wanted}
            response = infer_binary(client, asked, raw(ids), model="gpt2-small")
            length = int(response.headers[HEADER_LENGTH])
            answers.append((orjson.loads(response.content[:length])["outputs"], response.content[length:]))
    (documents, data), (_, lookups), (_, vectors) = answers
    assert [output["shape"] for output in documents] == [[100, 30, 768]] * 2
    assert np.array(documents[0]["data"], np.float32).tobytes() == lookups
    assert data == vectors


@pytest.mark.parametrize("outputs", [[], None])
@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_unnamed_outputs_are_all_of_the_metadata(tiny: httpx.Client, model: str, outputs: Any) -> None:
    declared = [output["name"] for output in tiny.get(f"/v2/models/{model}").json()["outputs"]]
    named = [{"name": name} for name in declared]
    found = infer(tiny, tensor(), model=model, outputs=outputs).json()
    assert [output["name"] for output in found["outputs"]] == declared == ["embeddings", "token_embeddings"]
    assert found == infer(tiny, tensor(), model=model, outputs=named).json()


@pytest.mark.parametrize(
    "length",
    ["x", "-1", "1.5", "+5", "1e3", "0x10", "", "99999999", "18446744073709551616", "9" * 5000, "٣", "1 2", "1,2"],
    ids=range(13),
)
def test_invalid_header_length_is_refused(tiny: httpx.Client, length: str) -> None:
    headers = {HEADER_LENGTH.encode(): length.encode()}
    content = json.dumps({"inputs": [tensor()]})
    error = error_of(tiny.post("/v2/models/gpt/infer", content=content, headers=headers))
    assert error.startswith(f"{HEADER_LENGTH}: got ")
    assert error.endswith(f", expected 0 to {len(content)}, the length of the body")


@pytest.mark.parametrize("length", ["1", "10"])
def test_a_header_length_that_cuts_the_json_is_refused(tiny: httpx.Client, length: str) -> None:
    assert error_of(infer_binary(tiny, {"inputs": [tensor()]}, b"", length)).startswith("body: not valid JSON")


@pytest.mark.parametrize("size", [-8, -1, 49, 2**31, 2**63, 2**64 - 1, "48", 48.0, True, [48], {}])
def test_invalid_binary_size_is_refused(tiny: httpx.Client, size: Any) -> None:
    error = error_of(infer_binary(tiny, {"inputs": [declared(IDS, binary_data_size=size)]}, raw(IDS)))
    assert error.startswith("inputs[0].binary_data_size: got ")
    assert error.endswith(", expected 0 to 48, the remaining bytes")


def test_binary_sizes_that_do_not_sum_up_are_refused(tiny: httpx.Client) -> None:
    inputs = [declared(IDS), declared([0], "offset", binary_data_size=16)]
    error = error_of(infer_binary(tiny, {"inputs": inputs}, raw(IDS) + bytes(8)))
    assert error == "inputs[1].binary_data_size: got 16, expected 0 to 8, the remaining bytes"


@pytest.mark.parametrize("extra", [1, 8])
def test_bytes_that_no_input_declares_are_refused(tiny: httpx.Client, extra: int) -> None:
    error = error_of(infer_binary(tiny, {"inputs": [declared(IDS)]}, raw(IDS) + bytes(extra)))
    assert error == f"body: got {extra} bytes more, expected the bytes that binary_data_size declares"


@pytest.mark.parametrize("missing", [1, 8, 48])
def test_missing_bytes_are_refused(tiny: httpx.Client, missing: int) -> None:
    error = error_of(infer_binary(tiny, {"inputs": [declared(IDS)]}, raw(IDS)[missing:]))
    assert error.startswith("inputs[0].binary_data_size: got 48, expected 0 to ")


@pytest.mark.parametrize("size", [0, 8, 47])
def test_bytes_that_do_not_fill_the_shape_are_refused(tiny: httpx.Client, size: int) -> None:
    error = error_of(infer_binary(tiny, {"inputs": [declared(IDS, binary_data_size=size)]}, bytes(size)))
    assert error == f"input_ids: got {size} bytes, expected 48 bytes for shape [2, 3]"


def test_binary_data_without_the_header_is_refused(tiny: httpx.Client) -> None:
    body = json.dumps({"inputs": [declared(IDS)]}).encode() + raw(IDS)
    assert error_of(tiny.post("/v2/models/gpt/infer", content=body)).startswith("body: not valid JSON")


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
        ([tensor(shape=[6])], "input_ids.shape: got [6], expected [batch, length]"),
        ([tensor(shape=[2, 3, 1])], "input_ids.shape: got [2, 3, 1], expected [batch, length]"),
        ([tensor(shape=[])], "input_ids.shape: got [], expected [batch, length]"),
        ([tensor(), tensor("offset", [[1]])], "offset.shape: got [1, 1], expected [1] or [batch]"),
        ([tensor(), tensor("offset", 1)], "inputs[1].data: got 1, expected a list"),
        ([tensor(), tensor("offset", [])], "offset.shape: got [0], expected sizes of 1 or more"),
        ([tensor(shape=[2, 4])], "input_ids.data: got 6 values, expected 8 for shape [2, 4]"),
        ([tensor(shape=[1, 1])], "input_ids.data: got 6 values, expected 1 for shape [1, 1]"),
        ([tensor(shape=[-2, -3])], "inputs[0].shape: got [-2, -3], expected a list of sizes"),
        ([tensor(shape=[-1, 3])], "inputs[0].shape: got [-1, 3], expected a list of sizes"),
        ([tensor(shape=[2.0, 3.0])], "inputs[0].shape: got [2.0, 3.0], expected a list of sizes"),
        ([tensor(shape=[True, 6])], "inputs[0].shape: got [True, 6], expected a list of sizes"),
        ([tensor(shape="2,3")], "inputs[0].shape: got 2,3, expected a list of sizes"),
        ([tensor(shape=None)], "inputs[0].shape: got None, expected a list of sizes"),
        (
            [tensor(shape=[2**32, 2**32])],
            f"input_ids.data: got 6 values, expected {2**64} for shape [{2**32}, {2**32}]",
        ),
        ([tensor(shape=[2**63, 2])], f"input_ids.data: got 6 values, expected {2**64} for shape [{2**63}, 2]"),
        ([tensor(data=[], shape=[2**40, 0])], f"input_ids.shape: got [{2**40}, 0], expected sizes of 1 or more"),
        ([tensor(data=[], shape=[0, 2**63])], f"input_ids.shape: got [0, {2**63}], expected sizes of 1 or more"),
        ([tensor(data=[[1, 2], 3], shape=[1, 3])], "inputs[0].data: got lists beside numbers, expected nested lists"),
        (
            [tensor(data=[[1, 2], [[3], [4]]], shape=[2, 2])],
            "inputs[0].data: got lists beside numbers, expected nested lists",
        ),
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
def test_a_bad_input_tensor_is_refused_by_name(tiny: httpx.Client, inputs: Any, error: str) -> None:
    assert error_of(tiny.post("/v2/models/gpt/infer", json={"inputs": inputs})).startswith(error)


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
def test_bad_wishes_for_the_output_are_refused_by_name(tiny: httpx.Client, more: dict[str, Any], error: str) -> None:
    assert error_of(infer(tiny, tensor(), **more)) == error


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_tritonclient_gets_the_bits_of_the_native_protocol(
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
