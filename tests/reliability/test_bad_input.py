"""Bad requests over every protocol.

Each is refused with the field, the value got and the value expected, and the server answers a good request right after.
"""

import json
from itertools import product
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.reliability.bad_input import BAD
from tests.reliability.wires import still_right
from tests.support.protocols import Clients, RequestRefused, call_grpc

JSON_PATHS = ("/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings")


@pytest.mark.parametrize("model", BAD)
def test_bad_input_is_rejected_and_server_keeps_serving(tiny_clients: Clients, good_answer: bytes, model: str) -> None:
    for fields, protocols, message in BAD[model]:
        for protocol in protocols:
            with pytest.raises(RequestRefused) as refused:
                protocol(tiny_clients, model, fields)
            assert message in refused.value.message, (protocol.__name__, fields)
            assert refused.value.status in (400, 422, "StatusCode.INVALID_ARGUMENT"), (protocol.__name__, fields)
        still_right(tiny_clients.http, good_answer)


def test_unknown_version_is_rejected(tiny_clients: Clients) -> None:
    for version in ("0", "3", "01", "-1", "1.0", "1%0a", "%EF%BC%91", "9" * 20, "%00"):
        for prefix, verb in (("", "embed"), ("/v2", "infer")):
            path = f"{prefix}/models/bert/versions/{version}/{verb}"
            response = tiny_clients.http.post(path, json={"input_ids": [1]})
            message = response.json()["error" if prefix else "detail"]
            assert (response.status_code, message.startswith("version: got ")) == (404, True), path
    for version in ("0", "3", "abc", "\0"):
        call = service_pb2.ModelInferRequest(model_name="bert", model_version=version)
        with pytest.raises(RequestRefused) as refused:
            call_grpc(tiny_clients, "ModelInfer", call)
        assert refused.value.status == "StatusCode.NOT_FOUND", version


NAMES = ["..%2f", "..%2fbert%2f1", "%2e%2e%2f", "%00", "bert%00", "%ff", ".", "bert%20", "BERT", "%5c..%5c", "a" * 4000]


def test_path_tricks_find_no_model(tiny_http: httpx.Client, good_answer: bytes) -> None:
    for name in NAMES:
        for prefix, verb in (("", "embed"), ("/v2", "infer")):
            response = tiny_http.post(f"{prefix}/models/{name}/{verb}", json={"input_ids": [1]})
            assert response.status_code in (404, 405), name
            kind = "application/json" if prefix else "application/problem+json"
            assert response.headers["Content-Type"] == kind, name
            assert len(response.content) < 9000, name
    still_right(tiny_http, good_answer)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


def test_deeply_nested_json_is_rejected(tiny_http: httpx.Client, good_answer: bytes) -> None:
    tensor = b'{"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": ' + nested(1000) + b"}]}"
    bodies = (
        (b'{"input_ids": ' + b"[" * 10_000_000, 400),
        (b'{"input_ids": ' + nested(5_000_000) + b"}", 400),
        (b'{"input_ids": ' + nested(1000) + b"}", 422),
        (b'{"offset": ' + nested(1000) + b', "input_ids": [1]}', 422),
        (b'{"dtype": ' + nested(1000) + b', "input_ids": [1]}', 422),
        (b'{"inputs": ' + nested(1000) + b"}", 422),
        (tensor, 422),
        (b'{"input": ' + nested(1000) + b', "model": "gpt"}', 422),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, 400),
        (b'{"a":' * 1_000_000, 400),
    )
    for path in JSON_PATHS:
        for body, status in bodies:
            response = tiny_http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == (400 if path.startswith("/v") else status), (path, body[:40])
            assert len(response.content) < 1000, (path, body[:40])
        still_right(tiny_http, good_answer)


NO_OBJECTS = (
    b"",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"input_ids": [NaN]}',
    b'{"input_ids": ["\\ud800"]}',
    b"{}x",
    bytes(100),
)


def test_body_without_json_object_is_rejected(tiny_http: httpx.Client) -> None:
    for path, body in product(JSON_PATHS, NO_OBJECTS):
        response = tiny_http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert (response.status_code, ", expected a JSON object" in response.text) == (400, True), (path, body)


def test_duplicate_json_key_is_rejected(tiny_http: httpx.Client) -> None:
    for path, body, name in (
        ("/models/gpt/embed", '{"input_ids": [1], "offset" : 1, "\\u006fffset"\n:2}', "offset"),
        ("/models/gpt/bias", '{"query_length": 1, "query_length": 2, "key_length": 2}', "query_length"),
        ("/v1/embeddings", '{"model": "gpt", "input": [1], "input": [2]}', "input"),
        ("/v2/models/gpt/infer", '{"inputs": [{"name": "input_ids", "shape": [1, 1], "shape": [1, 2]}]}', "shape"),
        ("/v2/repository/index", '{"ready": true, "ready": false}', "ready"),
    ):
        response = tiny_http.post(path, content=body)
        assert response.status_code == 400, path
        assert f"body: got {name} twice, expected each name of an object once" in response.text


def test_json_keys_inside_text_are_not_duplicates(tiny_http: httpx.Client) -> None:
    text = json.dumps({"text": 'a": "a": b', "return_tokens": True})
    assert tiny_http.post("/models/bert/embed", content=text).json()["input_ids"] == [[1, 3, 3, 5, 2]]
    deep = b'{"text": "\\":", "offset": ' + nested(1000) + b"}"
    assert tiny_http.post("/models/bert/embed", content=deep).status_code in (400, 422)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_limit_is_rejected(tiny_clients: Clients, good_answer: bytes, chunked: bool) -> None:
    size = 16 * 2**20 + 1
    for path in JSON_PATHS:
        content: Any = iter([bytes(size - 1), b"x"]) if chunked else bytes(size)
        # A client of its own, since the server closes this connection.
        response = httpx.post(tiny_clients.http.base_url.join(path), content=content, timeout=60)
        assert response.status_code == 413, path
        assert "expected at most 16777216 bytes" in response.text
    still_right(tiny_clients.http, good_answer)


def test_body_of_exact_limit_is_accepted(tiny_http: httpx.Client) -> None:
    body = b'{"input_ids": [1]}'.ljust(16 * 2**20)
    assert tiny_http.post("/models/gpt/embed", content=body).status_code == 200


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin1") + data


def described(descr: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


BROKEN_NPY = {
    "magic-alone": b"\x93NUMPY",
    "version-9": b"\x93NUMPY\x09\x00",
    "header-that-ends-early": b"\x93NUMPY\x01\x00\xff\xff{",
    "pickle": npy(described("'|O'", "(1,)"), b"\x80\x04K\x01."),
    "too-few-bytes": npy(described("'<i8'", "(2,)"), bytes(8)),
    "too-many-bytes": npy(described("'<i8'", "(2,)"), bytes(24)),
    "negative-size": npy(described("'<i8'", "(-1,)"), bytes(8)),
    "bool-size": npy(described("'<i8'", "(True,)"), bytes(8)),
    "product-2^64": npy(described("'<i8'", f"({2**61}, 8)")),
    "no-rows-of-2^70": npy(described("'<i8'", f"(0, {2**70})")),
    "2^40-empty-rows": npy(described("'<i8'", f"({2**40}, 0)")),
    "empty-row": npy(described("'<i8'", "(0,)")),
    "no-dimension": npy(described("'<i8'", "()"), bytes(8)),
    "100-dimensions": npy(described("'<i8'", "(" + "1," * 100 + ")"), bytes(8)),
    "array-type": npy(described("('<i8', (2,))", "(1, 2)"), bytes(32)),
    "record-type": npy(described("[('a', '<i8')]", "(1,)"), bytes(8)),
    "type-of-0-bytes": npy(described("'V0'", "(1,)")),
    "times": npy(described("'<M8[s]'", "(1,)"), bytes(8)),
    "no-type": npy(described("5", "(1,)"), bytes(8)),
    "no-keys": npy("{}"),
    "open-brackets": npy("(" * 9000),
    "9000-signs": npy("-" * 9000 + "1"),
    "long-sum": npy("1" + "+1j" * 3000),
    "open-string": npy("'''"),
    "code": npy("__import__('os').abort()"),
    "long-header": npy("x" * 20_000, version=(2, 0)),
}


def test_invalid_npy_is_rejected(tiny_http: httpx.Client, good_answer: bytes) -> None:
    for name, body in BROKEN_NPY.items():
        response = tiny_http.post("/models/gpt/embed", content=body, headers={"Content-Type": "application/x-npy"})
        assert response.status_code in (400, 422), name
        assert response.json()["field"] in ("body", "input_ids dtype", "input_ids shape"), name
    still_right(tiny_http, good_answer)


def test_long_value_is_not_echoed_in_error(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/models/gpt/embed", content=json.dumps({"input_ids": ["x" * 1_000_000]}))
    assert response.status_code == 422
    assert len(response.content) < 1000
