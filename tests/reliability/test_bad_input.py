"""Bad requests over every protocol.

Each is refused with the field, the value got and the value expected, and the server answers a good request right after.
"""

import json
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.reliability.bad_input import BAD
from tests.reliability.wires import still_right
from tests.support.protocols import Clients, Fields, Protocol, RequestRefused, call_grpc
from tests.support.servers import LOADING_HINT


@pytest.mark.parametrize(
    ("model", "fields", "protocol", "message"),
    [
        pytest.param(model, fields, protocol, message, id=f"{model}-{number}-{protocol.__name__}")
        for model, rows in BAD.items()
        for number, (fields, protocols, message) in enumerate(rows)
        for protocol in protocols
    ],
)
def test_bad_input_is_rejected_and_server_keeps_serving(
    tiny_clients: Clients,
    good_answer: bytes,
    model: str,
    fields: Fields,
    protocol: Protocol,
    message: str,
) -> None:
    with pytest.raises(RequestRefused) as refused:
        protocol(tiny_clients, model, fields)
    assert message in refused.value.message
    assert refused.value.status in (400, 422, "StatusCode.INVALID_ARGUMENT")
    still_right(tiny_clients.http, good_answer)


@pytest.mark.parametrize(
    "version", ["0", "3", "01", "-1", "1.0", "abc", "1%0a", "%EF%BC%91", "99999999999999999999", "%00"]
)
@pytest.mark.parametrize(("prefix", "verb"), [("", "embed"), ("/v2", "infer")])
def test_unknown_version_is_rejected(tiny_http: httpx.Client, prefix: str, verb: str, version: str) -> None:
    response = tiny_http.post(f"{prefix}/models/bert/versions/{version}/{verb}", json={"input_ids": [1]})
    assert response.status_code == 404
    document = response.json()
    message = document["error"] if prefix else document["detail"]
    assert message.startswith("version: got ")
    assert message.endswith(f", expected 1, 2; {LOADING_HINT}")


@pytest.mark.parametrize("version", ["0", "3", "abc", "..", "\0"])
def test_unknown_version_over_grpc_is_rejected(tiny_clients: Clients, version: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        call_grpc(tiny_clients, "ModelInfer", service_pb2.ModelInferRequest(model_name="bert", model_version=version))
    assert refused.value.status == "StatusCode.NOT_FOUND"
    assert refused.value.message == f"version: got {version}, expected 1, 2; {LOADING_HINT}"


NAMES = ["..%2f", "..%2fbert%2f1", "%2e%2e%2f", "bert%2f1", "%00", "bert%00", "%ff", ".", "bert%20", "BERT", "%5c..%5c"]


@pytest.mark.parametrize("name", [*NAMES, "a" * 4000], ids=lambda name: name[:20])
@pytest.mark.parametrize(("prefix", "verb"), [("", "embed"), ("/v2", "infer")])
def test_path_tricks_find_no_model(
    tiny_clients: Clients, good_answer: bytes, prefix: str, verb: str, name: str
) -> None:
    response = tiny_clients.http.post(f"{prefix}/models/{name}/{verb}", json={"input_ids": [1]})
    assert response.status_code in (404, 405)
    assert response.headers["Content-Type"] == ("application/json" if prefix else "application/problem+json")
    assert len(response.content) < 9000
    still_right(tiny_clients.http, good_answer)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b'{"input_ids": ' + b"[" * 10_000_000, 400, id="10-MB-open"),
        pytest.param(b'{"input_ids": ' + nested(5_000_000) + b"}", 400, id="10-MB-closed"),
        pytest.param(b'{"input_ids": ' + nested(1000) + b"}", 422, id="1000-lists"),
        pytest.param(b'{"offset": ' + nested(1000) + b', "input_ids": [1]}', 422, id="1000-lists-offset"),
        pytest.param(b'{"dtype": ' + nested(1000) + b', "input_ids": [1]}', 422, id="1000-lists-dtype"),
        pytest.param(b'{"inputs": ' + nested(1000) + b"}", 422, id="1000-lists-inputs"),
        pytest.param(b'{"inputs": [{"name": ' + nested(1000) + b"}]}", 422, id="1000-lists-name"),
        pytest.param(
            b'{"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": ' + nested(1000) + b"}]}",
            422,
            id="1000-lists-shape",
        ),
        pytest.param(b'{"input": ' + nested(1000) + b', "model": "gpt"}', 422, id="1000-lists-input"),
        pytest.param(b"{" * 1_000_000, 400, id="braces"),
        pytest.param(b'{"a":' * 1000 + b"1" + b"}" * 1000, 400, id="1000-objects"),
        pytest.param(b'{"a":' * 1_000_000, 400, id="objects"),
    ],
)
@pytest.mark.parametrize("path", ["/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings"])
def test_deeply_nested_json_is_rejected(
    tiny_clients: Clients, good_answer: bytes, path: str, body: bytes, status: int
) -> None:
    response = tiny_clients.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == (400 if path.startswith("/v") else status)
    assert len(response.content) < 1000
    still_right(tiny_clients.http, good_answer)


NO_OBJECTS = (
    *(b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"{", b'{"input_ids": [NaN]}', b'{"input_ids": ["\\ud800"]}'),
    *(b"\xef\xbb\xbf{}", b"{}x", bytes(100)),
)


@pytest.mark.parametrize("body", NO_OBJECTS)
@pytest.mark.parametrize("path", ["/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings"])
def test_body_without_json_object_is_rejected(tiny_http: httpx.Client, path: str, body: bytes) -> None:
    response = tiny_http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert ", expected a JSON object" in response.text


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/models/gpt/embed", '{"input_ids": [1], "offset": 1, "offset": 2}', "offset"),
        ("/models/gpt/embed", '{"input_ids": [1], "offset" : 1, "\\u006fffset"\n:2}', "offset"),
        ("/models/gpt/bias", '{"query_length": 1, "query_length": 2, "key_length": 2}', "query_length"),
        ("/v1/embeddings", '{"model": "gpt", "input": [1], "input": [2]}', "input"),
        ("/v2/models/gpt/infer", '{"inputs": [], "inputs": []}', "inputs"),
        ("/v2/models/gpt/infer", '{"inputs": [{"name": "input_ids", "shape": [1, 1], "shape": [1, 2]}]}', "shape"),
        ("/v2/models/gpt/infer", '{"inputs": [], "parameters": {"offset": 1, "offset": 2}}', "offset"),
        ("/v2/repository/index", '{"ready": true, "ready": false}', "ready"),
    ],
)
def test_duplicate_json_key_is_rejected(tiny_http: httpx.Client, path: str, body: str, name: str) -> None:
    response = tiny_http.post(path, content=body)
    assert response.status_code == 400
    assert f"body: got {name} twice, expected each name of an object once" in response.text


def test_json_keys_inside_text_are_not_duplicates(tiny_http: httpx.Client) -> None:
    text = json.dumps({"text": 'a": "a": b', "return_tokens": True})
    assert tiny_http.post("/models/bert/embed", content=text).json()["input_ids"] == [[1, 3, 3, 5, 2]]
    deep = b'{"text": "\\":", "offset": ' + nested(1000) + b"}"
    assert tiny_http.post("/models/bert/embed", content=deep).status_code in (400, 422)


@pytest.mark.parametrize("path", ["/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings"])
@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_limit_is_rejected(tiny_clients: Clients, good_answer: bytes, path: str, chunked: bool) -> None:
    size = 16 * 2**20 + 1
    content: Any = iter([bytes(size - 1), b"x"]) if chunked else bytes(size)
    # A client of its own, since the server closes this connection.
    response = httpx.post(tiny_clients.http.base_url.join(path), content=content, timeout=60)
    assert response.status_code == 413
    got = "more than 16777216 bytes" if chunked else "16777217 bytes"
    assert f"body: got {got}, expected at most 16777216 bytes" in response.text
    still_right(tiny_clients.http, good_answer)


def test_body_of_exact_limit_is_accepted(tiny_http: httpx.Client) -> None:
    body = b'{"input_ids": [1]}'.ljust(16 * 2**20)
    assert tiny_http.post("/models/gpt/embed", content=body).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", "application/x-pickle", "", "json"]
)
@pytest.mark.parametrize("path", ["/models/gpt/embed", "/v2/models/gpt/infer"])
def test_unsupported_content_type_is_rejected(tiny_http: httpx.Client, path: str, kind: str) -> None:
    response = tiny_http.post(path, content=b'{"input_ids": [1]}', headers={"Content-Type": kind})
    assert response.status_code == 415
    assert f"Content-Type: got {kind}, expected application/json or application/" in response.text


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin1") + data


def described(descr: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x93NUMPY", id="magic-alone"),
        pytest.param(b"\x93NUMPY\x09\x00", id="version-9"),
        pytest.param(b"\x93NUMPY\x01\x00\xff\xff{", id="header-that-ends-early"),
        pytest.param(npy(described("'|O'", "(1,)"), b"\x80\x04K\x01."), id="pickle"),
        pytest.param(npy(described("'<i8'", "(2,)"), bytes(8)), id="too-few-bytes"),
        pytest.param(npy(described("'<i8'", "(2,)"), bytes(24)), id="too-many-bytes"),
        pytest.param(npy(described("'<i8'", "(-1,)"), bytes(8)), id="negative-size"),
        pytest.param(npy(described("'<i8'", "(True,)"), bytes(8)), id="bool-size"),
        pytest.param(npy(described("'<i8'", f"({2**61}, 8)")), id="product-2^64"),
        pytest.param(npy(described("'<i8'", f"(0, {2**70})")), id="no-rows-of-2^70"),
        pytest.param(npy(described("'<i8'", f"({2**40}, 0)")), id="2^40-empty-rows"),
        pytest.param(npy(described("'<i8'", f"({2**33}, 0)")), id="2^33-empty-rows"),
        pytest.param(npy(described("'<i8'", "(0, 3)")), id="no-rows"),
        pytest.param(npy(described("'<i8'", "(3, 0)")), id="empty-rows"),
        pytest.param(npy(described("'<i8'", "(0,)")), id="empty-row"),
        pytest.param(npy(described("'<i8'", "()"), bytes(8)), id="no-dimension"),
        pytest.param(npy(described("'<i8'", "(" + "1," * 100 + ")"), bytes(8)), id="100-dimensions"),
        pytest.param(npy(described("('<i8', (2,))", "(1, 2)"), bytes(32)), id="array-type"),
        pytest.param(npy(described("[('a', '<i8')]", "(1,)"), bytes(8)), id="record-type"),
        pytest.param(npy(described("[]", "(1,)")), id="empty-record-type"),
        pytest.param(npy(described("'V0'", "(1,)")), id="type-of-0-bytes"),
        pytest.param(npy(described("'<f8'", "(1,)"), bytes(8)), id="floats"),
        pytest.param(npy(described("'<M8[s]'", "(1,)"), bytes(8)), id="times"),
        pytest.param(npy(described("5", "(1,)"), bytes(8)), id="no-type"),
        pytest.param(npy("{}"), id="no-keys"),
        pytest.param(npy("(" * 9000), id="open-brackets"),
        pytest.param(npy("-" * 9000 + "1"), id="9000-signs"),
        pytest.param(npy("1" + "+1j" * 3000), id="long-sum"),
        pytest.param(npy("'''"), id="open-string"),
        pytest.param(npy("__import__('os').abort()"), id="code"),
        pytest.param(npy("x" * 20_000, version=(2, 0)), id="long-header"),
    ],
)
def test_invalid_npy_is_rejected(tiny_clients: Clients, good_answer: bytes, body: bytes) -> None:
    response = tiny_clients.http.post("/models/gpt/embed", content=body, headers={"Content-Type": "application/x-npy"})
    assert response.status_code in (400, 422)
    assert response.json()["field"] in ("body", "input_ids dtype", "input_ids shape")
    still_right(tiny_clients.http, good_answer)


def test_long_value_is_not_echoed_in_error(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/models/gpt/embed", content=json.dumps({"input_ids": ["x" * 1_000_000]}))
    assert response.status_code == 422
    assert len(response.content) < 1000
