"""Bad requests over every protocol.

Each is refused with the field, the value got and the value expected, and the server answers a good request right after.
"""

import json
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.reliability.wires import still_right
from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.protocols import (
    TENSORS,
    Clients,
    Fields,
    Protocol,
    RequestRefused,
    call_grpc,
    grpc_raw,
    grpc_typed,
    native_json,
    native_npy,
    native_raw,
    native_safetensors,
    open_inference_binary,
    open_inference_json,
)
from tests.support.servers import LOADING_HINT

BINARY = (native_npy, native_raw, native_safetensors, *TENSORS)
TENSOR = (native_json, *BINARY)
STREAMS = (decode_json, decode_frame)
EVERY = (*TENSOR, *STREAMS)
BATCHES = (*TENSOR, decode_json)
JSON_PROTOCOLS = (native_json, open_inference_json, decode_json)
NATIVE = (native_json, native_npy)
OWN_JSON = (native_json, decode_json)

Row = tuple[Fields, tuple[Protocol, ...], str]
BAD: dict[str, list[Row]] = {
    "bert": [
        ({"input_ids": [[1, -1]]}, EVERY, "input_ids[0][1]: got -1, expected 0 to 10"),
        ({"input_ids": [[1, 11]]}, EVERY, "input_ids[0][1]: got 11, expected 0 to 10"),
        ({"input_ids": [[-(2**63)]]}, EVERY, "input_ids[0][0]: got -9223372036854775808, expected 0 to 10"),
        ({"input_ids": [[2**63]]}, (*JSON_PROTOCOLS, native_npy), "got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1, 2.0]]}, JSON_PROTOCOLS, "[1]: got 2.0, expected a 64-bit integer"),
        ({"input_ids": [[1.0, 2.0]]}, (native_npy,), "input_ids dtype: got float64, expected an integer type"),
        ({"input_ids": [[1, True]]}, JSON_PROTOCOLS, "[1]: got True, expected a 64-bit integer"),
        ({"input_ids": [[True]]}, (native_npy,), "input_ids dtype: got bool, expected an integer type"),
        ({"input_ids": [[1, "2"]]}, JSON_PROTOCOLS, "[1]: got '2', expected a 64-bit integer"),
        ({"input_ids": [["2"]]}, (native_npy,), "input_ids dtype: got <U1, expected an integer type"),
        ({"input_ids": [[1, None]]}, JSON_PROTOCOLS, "[1]: got None, expected a 64-bit integer"),
        ({"input_ids": [[None]]}, (native_npy,), "body: not a valid .npy file "),
        ({"input_ids": [[{}]]}, JSON_PROTOCOLS, "got {}, expected a 64-bit integer"),
        ({"input_ids": [[[1]]]}, OWN_JSON, "input_ids[0][0]: got [1], expected a 64-bit integer"),
        (
            {"input_ids": [[[1]]]},
            (open_inference_binary, grpc_raw),
            "input_ids.shape: got [1, 1, 1], expected [batch, ",
        ),
        ({"input_ids": [[[1]]]}, (native_npy,), "input_ids shape: got (1, 1, 1), expected (length,) or (batch, "),
        ({"input_ids": "12"}, OWN_JSON, "input_ids: got '12', expected a list of integers"),
        ({"input_ids": 12}, OWN_JSON, "input_ids: got 12, expected a list of integers"),
        ({"input_ids": [[1], 2]}, OWN_JSON, "input_ids[1]: got 2, expected a row"),
        ({"input_ids": []}, OWN_JSON, "input_ids: got [], expected at least one row"),
        ({"input_ids": []}, (open_inference_json, grpc_typed), "input_ids.shape: got [0, 0], expected sizes of 1 "),
        ({"input_ids": [[1], []]}, (native_json,), "input_ids[1]: got [], expected a row of at least one"),
        ({"input_ids": [[], []]}, TENSORS, "input_ids.shape: got [2, 0], expected sizes of 1 or more"),
        ({"input_ids": [[]]}, STREAMS, "input_ids[0]: got an empty row, expected at least one id"),
        ({"input_ids": [[1], [2]]}, (decode_json,), "input_ids: got 2 rows, expected one row"),
        ({"offset": 0}, (native_json,), "input_ids, text or parts is required"),
        ({"offset": 0}, TENSORS, "inputs: got no input_ids, expected a tensor input_ids"),
        ({"token_type_ids": [0]}, (decode_json,), "input_ids: got None, expected a list of integers"),
        ({"input_ids": [[1]], "mask": [[1]]}, NATIVE, "unknown field mask; expected input_ids, "),
        ({"input_ids": [[1]], "mask": [[1]]}, TENSORS, "inputs.name: got mask, expected input_ids, "),
        ({"input_ids": [[1]], "mask": [[1]]}, (decode_json,), "unknown field mask; expected input_ids, position_ids, "),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 2]]}, BATCHES, "token_type_ids[0][1]: got 2, expected 0 to 1"),
        (
            {"input_ids": [[1, 2]], "token_type_ids": [[-1, 0]]},
            BATCHES,
            "token_type_ids[0][0]: got -1, expected 0 to 1",
        ),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0]]}, BATCHES, "token_type_ids[0]: got 1 values, expected 2 "),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 0]] * 2}, BATCHES, "token_type_ids: got 2 rows, expected 1 "),
    ],
    "gpt": [
        ({"input_ids": [[7, 0]]}, EVERY, "input_ids[0][0]: got 7, expected 0 to 6"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 0]]}, BATCHES, "token_type_ids is not an input: "),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, TENSOR, "attention_mask[0][1]: got 2, expected 0 to 1"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, TENSOR, "attention_mask[0]: got 3 values, expected 2"),
        ({"input_ids": [[1, 2]], "position_ids": [[0, 6]]}, TENSOR, "position_ids[0][1]: got 6, expected 0 to 5"),
        ({"input_ids": [[1, 2]], "position_ids": [[-1, 0]]}, TENSOR, "position_ids[0][0]: got -1, expected 0 to 5"),
        ({"input_ids": [[1]], "position_ids": [[0]], "offset": 0}, TENSOR, "offset and position_ids exclude each oth"),
        ({"input_ids": [[1]], "offset": -1}, TENSOR, "offset[0]: got -1, expected 0 or more"),
        ({"input_ids": [[1]], "offset": -1}, STREAMS, "offset: got -1, expected 0 to 6"),
        ({"input_ids": [[1], [1]], "offset": [0, -1]}, TENSOR, "offset[1]: got -1, expected 0 or more"),
        ({"input_ids": [[1, 2, 3]], "offset": 4}, EVERY, "offset[0] + tokens: got 4 + 3 = 7, expected at most 6"),
        ({"input_ids": [[1, 2], [1, 2]], "offset": [4, 5]}, TENSOR, "offset[1] + tokens: got 5 + 2 = 7, expected at"),
        ({"input_ids": [[0] * 7]}, EVERY, "offset[0] + tokens: got 0 + 7 = 7, expected at most 6"),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]], "offset": 5},
            TENSOR,
            "got 5 + 2 = 7, expected at most 6",
        ),
        ({"input_ids": [[1, 2]], "offset": 2**63 - 1}, TENSOR, "got 9223372036854775807 + 2 = 9223372036854775809"),
        ({"input_ids": [[1]], "offset": 2**63 - 1}, STREAMS, "offset: got 9223372036854775807, expected 0 to 6"),
        ({"input_ids": [[1]], "offset": -(2**63)}, TENSOR, "offset[0]: got -9223372036854775808, expected 0 or more"),
        ({"input_ids": [[1]], "offset": 2**63}, NATIVE, "offset: got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1]], "offset": 2**63}, (open_inference_json,), "offset.data[0]: got 9223372036854775808, "),
        ({"input_ids": [[1]], "offset": 2**63}, STREAMS, "offset: got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1]], "offset": 2**64}, (*NATIVE, *STREAMS), "offset: got 1.8446744073709552e+19, expected a"),
        ({"input_ids": [[1]], "offset": 1.0}, (*NATIVE, *STREAMS), "offset: got 1.0, expected a"),
        ({"input_ids": [[1]], "offset": True}, NATIVE, "offset: got True, expected a"),
        ({"input_ids": [[1]], "offset": "1"}, NATIVE, "offset: got '1', expected a"),
        ({"input_ids": [[1]], "offset": []}, NATIVE, "offset: got [], expected a"),
        ({"input_ids": [[1], [1]], "offset": [0, 0, 0]}, TENSOR, "offset: got 3 values, expected one value, or one "),
        ({"input_ids": [[1]], "dtype": "float64"}, (native_json,), "dtype: got float64, expected float32, "),
        ({"input_ids": [[1]], "dtype": 5}, (native_json,), "dtype: got 5, expected a name"),
        ({"input_ids": [[1]], "encoding": "hex"}, (native_json,), "encoding: got hex, expected base64, "),
    ],
}
"""Fields, the protocols that can express them, and a part of the message, by model."""


@pytest.mark.parametrize("model", BAD)
def test_bad_input_is_rejected_and_server_keeps_serving(tiny_clients: Clients, good_answer: bytes, model: str) -> None:
    for fields, protocols, message in BAD[model]:
        for protocol in protocols:
            case = f"{protocol.__name__} {fields}"
            with pytest.raises(RequestRefused) as refused:
                pytest.fail(f"accepted: {case} {protocol(tiny_clients, model, fields)}")
            assert message in refused.value.message, case
            assert refused.value.status in (400, 422, "StatusCode.INVALID_ARGUMENT"), case
            still_right(tiny_clients.http, good_answer)


VERSIONS = ["0", "3", "01", "-1", "1.0", "abc", "1%0a", "%EF%BC%91", "99999999999999999999", "%00"]


def test_unknown_version_is_rejected(tiny_clients: Clients) -> None:
    end = f", expected 1, 2; {LOADING_HINT}"
    for version in VERSIONS:
        for path, part in (
            ("/models/bert/versions/{}/embed", "detail"),
            ("/v2/models/bert/versions/{}/infer", "error"),
        ):
            response = tiny_clients.http.post(path.format(version), json={"input_ids": [1]})
            message = response.json()[part]
            assert (response.status_code, message[:13], message.endswith(end)) == (404, "version: got ", True), message
    for version in ("0", "3", "abc", "..", "\0"):
        request = service_pb2.ModelInferRequest(model_name="bert", model_version=version)
        with pytest.raises(RequestRefused) as refused:
            call_grpc(tiny_clients, "ModelInfer", request)
        assert (refused.value.status, refused.value.message) == ("StatusCode.NOT_FOUND", f"version: got {version}{end}")


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
        (b'{"input_ids": ' + b"[" * 10_000_000, 400),
        (b'{"input_ids": ' + nested(5_000_000) + b"}", 400),
        (b'{"input_ids": ' + nested(1000) + b"}", 422),
        (b'{"offset": ' + nested(1000) + b', "input_ids": [1]}', 422),
        (b'{"dtype": ' + nested(1000) + b', "input_ids": [1]}', 422),
        (b'{"inputs": ' + nested(1000) + b"}", 422),
        (b'{"inputs": [{"name": ' + nested(1000) + b"}]}", 422),
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


def test_body_without_json_object_is_rejected(tiny_http: httpx.Client) -> None:
    for body in (
        *(b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"{", b'{"input_ids": [NaN]}', b'{"input_ids": ["\\ud800"]}'),
        *(b"\xef\xbb\xbf{}", b"{}x", bytes(100)),
    ):
        for path in PATHS:
            response = tiny_http.post(path, content=body, headers=JSON)
            assert (response.status_code, ", expected a JSON object" in response.text) == (400, True), (path, body)


def test_duplicate_json_key_is_rejected(tiny_http: httpx.Client) -> None:
    infer = "/v2/models/gpt/infer"
    for path, body, name in (
        ("/models/gpt/embed", '{"input_ids": [1], "offset": 1, "offset": 2}', "offset"),
        ("/models/gpt/embed", '{"input_ids": [1], "offset" : 1, "\\u006fffset"\n:2}', "offset"),
        ("/models/gpt/bias", '{"query_length": 1, "query_length": 2, "key_length": 2}', "query_length"),
        ("/v1/embeddings", '{"model": "gpt", "input": [1], "input": [2]}', "input"),
        (infer, '{"inputs": [], "inputs": []}', "inputs"),
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


def test_body_over_limit_is_rejected(tiny_http: httpx.Client) -> None:
    limit = 16 * 2**20
    exact = b'{"input_ids": [1]}'.ljust(limit)
    assert tiny_http.post(PATHS[0], content=exact).status_code == 200
    sent: tuple[tuple[Any, str], ...] = (
        (exact + b" ", f"{limit + 1} bytes"),
        (iter([exact, b" "]), f"more than {limit}"),
    )
    for content, got in sent:
        # A client of its own, since the server closes this connection.
        response = httpx.post(tiny_http.base_url.join(PATHS[0]), content=content, timeout=60)
        assert (response.status_code, f"body: got {got}" in response.text) == (413, True)


def test_unsupported_content_type_is_rejected(tiny_http: httpx.Client) -> None:
    for kind in (
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/x-pickle",
        "",
        "json",
    ):
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
