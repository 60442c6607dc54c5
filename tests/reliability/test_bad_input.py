"""Bad requests over every protocol.

Each is refused with the field, the value got and the value expected, and the server answers a good request right after.
"""

import json

import httpx
import pytest

from tests.reliability.wires import still_right
from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.protocols import (
    TENSORS,
    Clients,
    Fields,
    Protocol,
    RequestRefused,
    native_json,
    native_npy,
    native_raw,
    native_safetensors,
    open_inference_json,
)

TENSOR = (native_json, native_npy, native_raw, native_safetensors, *TENSORS)
EVERY = (*TENSOR, decode_json, decode_frame)
BATCHES = (*TENSOR, decode_json)
JSON_PROTOCOLS = (native_json, open_inference_json, decode_json)
OWN_JSON = (native_json, decode_json)

BAD: list[tuple[str, Fields, tuple[Protocol, ...], str]] = [
    ("bert", {"input_ids": [[1, -1]]}, EVERY, "input_ids[0][1]: got -1, expected 0 to 10"),
    ("bert", {"input_ids": [[2**63]]}, (*JSON_PROTOCOLS, native_npy), f"got {2**63}, expected a 64-bit integer"),
    ("bert", {"input_ids": [[1, True]]}, JSON_PROTOCOLS, "[1]: got True, expected a 64-bit integer"),
    ("bert", {"input_ids": [[1, 2]], "token_type_ids": [[-1, 0]]}, BATCHES, "token_type_ids[0][0]: got -1, expected 0"),
    ("bert", {"input_ids": [[1, 2]], "token_type_ids": [[0, 0]] * 2}, BATCHES, "token_type_ids: got 2 rows, expected"),
    ("gpt", {"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, TENSOR, "attention_mask[0]: got 3 values, expect"),
    ("gpt", {"input_ids": [[1, 2]], "position_ids": [[0, 6]]}, TENSOR, "position_ids[0][1]: got 6, expected 0 to 5"),
    ("gpt", {"input_ids": [[1], [1]], "offset": [0, -1]}, TENSOR, "offset[1]: got -1, expected 0 or more"),
    ("gpt", {"input_ids": [[1, 2, 3]], "offset": 4}, EVERY, "offset[0] + tokens: got 4 + 3 = 7, expected at most 6"),
    ("gpt", {"input_ids": [[1]], "offset": 2**63}, (*OWN_JSON, native_npy), f"offset: got {2**63}, expected a 64-bit"),
    ("gpt", {"input_ids": [[1]], "dtype": "float64"}, (native_json,), "dtype: got float64, expected float32, "),
    ("gpt", {"input_ids": [[1]], "encoding": "hex"}, (native_json,), "encoding: got hex, expected base64, "),
]
"""Model, fields, the protocols that can express them, and a part of the message: one row for each kind of mistake."""


def test_bad_input_is_rejected_and_server_keeps_serving(tiny_clients: Clients, good_answer: bytes) -> None:
    for model, fields, protocols, message in BAD:
        for protocol in protocols:
            case = f"{protocol.__name__} {fields}"
            with pytest.raises(RequestRefused) as refused:
                pytest.fail(f"accepted: {case} {protocol(tiny_clients, model, fields)}")
            assert message in refused.value.message, case
            assert refused.value.status in (400, 422, "StatusCode.INVALID_ARGUMENT"), case
            still_right(tiny_clients.http, good_answer)


NAMES = ["..%2f", "..%2fbert%2f1", "%2e%2e%2f", "bert%2f1", "%00", "bert%00", "%ff", ".", "bert%20", "BERT", "%5c..%5c"]


def test_path_tricks_find_no_model(tiny_clients: Clients, good_answer: bytes) -> None:
    for name in (*NAMES, "a" * 4000):
        for path, media in (
            ("/models/{}/embed", "application/problem+json"),
            ("/v2/models/{}/infer", "application/json"),
        ):
            response = tiny_clients.http.post(path.format(name), json={"input_ids": [1]})
            assert response.status_code in (404, 405), name
            assert (response.headers["Content-Type"], len(response.content) < 9000) == (media, True), name
    still_right(tiny_clients.http, good_answer)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


PATHS = "/models/gpt/embed", "/v2/models/gpt/infer", "/v1/embeddings"
JSON = {"Content-Type": "application/json"}


def test_deeply_nested_json_is_rejected(tiny_clients: Clients, good_answer: bytes) -> None:
    for body, status in (
        (b'{"input_ids": ' + nested(5_000_000) + b"}", 400),
        (b'{"input_ids": ' + nested(1000) + b"}", 422),
        (b'{"offset": ' + nested(1000) + b', "input_ids": [1]}', 422),
        (b'{"inputs": ' + nested(1000) + b"}", 422),
        (b'{"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": ' + nested(1000) + b"}]}", 422),
        (b'{"input": ' + nested(1000) + b', "model": "gpt"}', 422),
        (b"{" * 1_000_000, 400),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, 400),
        (b'{"a":' * 1_000_000, 400),
    ):
        for path in PATHS:
            response = tiny_clients.http.post(path, content=body, headers=JSON)
            assert response.status_code == (400 if path.startswith("/v") else status), (path, body[:80])
            assert len(response.content) < 1000
            still_right(tiny_clients.http, good_answer)


def test_duplicate_json_key_is_rejected(tiny_http: httpx.Client) -> None:
    infer = "/v2/models/gpt/infer"
    for path, body, name in (
        ("/models/gpt/embed", '{"input_ids": [1], "offset": 1, "offset": 2}', "offset"),
        ("/models/gpt/embed", '{"input_ids": [1], "offset" : 1, "\\u006fffset"\n:2}', "offset"),
        ("/v1/embeddings", '{"model": "gpt", "input": [1], "input": [2]}', "input"),
        (infer, '{"inputs": [{"name": "input_ids", "shape": [1, 1], "shape": [1, 2]}]}', "shape"),
        (infer, '{"inputs": [], "parameters": {"offset": 1, "offset": 2}}', "offset"),
        ("/v2/repository/index", '{"ready": true, "ready": false}', "ready"),
    ):
        response = tiny_http.post(path, content=body)
        expected = f"body: got {name} twice, expected each name of an object once"
        assert (response.status_code, expected in response.text) == (400, True), body


def test_json_keys_inside_text_are_not_duplicates(tiny_http: httpx.Client) -> None:
    text = json.dumps({"text": 'a": "a": b', "return_tokens": True})
    assert tiny_http.post("/models/bert/embed", content=text).json()["input_ids"] == [[1, 3, 3, 5, 2]]
    deep = b'{"text": "\\":", "offset": ' + nested(1000) + b"}"
    assert tiny_http.post("/models/bert/embed", content=deep).status_code in (400, 422)


def test_unsupported_content_type_is_rejected(tiny_http: httpx.Client) -> None:
    for kind in ("text/plain", "multipart/form-data; boundary=x", "", "json"):
        for path in PATHS:
            response = tiny_http.post(path, content=b'{"input_ids": [1]}', headers={"Content-Type": kind})
            expected = f"Content-Type: got {kind}, expected application/json"
            expected += " or application/" if path != PATHS[2] else ""
            assert (response.status_code, expected in response.text) == (415, True), kind


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin1") + data


def described(descr: str, shape: str) -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


INTEGER = "'<i8'"
HEADERS = (
    *((INTEGER, shape, bytes(8)) for shape in ("(2,)", "(-1,)", "(True,)", "()", "(" + "1," * 100 + ")")),
    (INTEGER, "(2,)", bytes(24)),
    *((INTEGER, f"({shape})", b"") for shape in (f"{2**61}, 8", f"0, {2**70}", f"{2**40}, 0", f"{2**33}, 0")),
    *((INTEGER, shape, b"") for shape in ("(0, 3)", "(3, 0)", "(0,)")),
    *((kind, "(1,)", bytes(8)) for kind in ("[('a', '<i8')]", "'<f8'", "'<M8[s]'", "5")),
    *((kind, "(1,)", b"") for kind in ("[]", "'V0'")),
    ("('<i8', (2,))", "(1, 2)", bytes(32)),
    ("'|O'", "(1,)", b"\x80\x04K\x01."),
)
"""Type, shape and data of invalid arrays."""
NO_HEADERS = ("{}", "(" * 9000, "-" * 9000 + "1", "1" + "+1j" * 3000, "'''", "__import__('os').abort()")
"""Headers that are no description of an array."""


def test_invalid_npy_is_rejected(tiny_clients: Clients, good_answer: bytes) -> None:
    for body in (
        *(b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00", b"\x93NUMPY\x01\x00\xff\xff{"),
        *(npy(described(kind, shape), data) for kind, shape, data in HEADERS),
        *map(npy, NO_HEADERS),
        npy("x" * 20_000, version=(2, 0)),
    ):
        headers = {"Content-Type": "application/x-npy"}
        response = tiny_clients.http.post("/models/gpt/embed", content=body, headers=headers)
        assert response.status_code in (400, 422), body[:200]
        assert response.json()["field"] in ("body", "input_ids dtype", "input_ids shape"), body[:200]
        still_right(tiny_clients.http, good_answer)


def test_long_value_is_not_echoed_in_error(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/models/gpt/embed", content=json.dumps({"input_ids": ["x" * 1_000_000]}))
    assert response.status_code == 422
    assert len(response.content) < 1000
