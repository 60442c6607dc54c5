"""Binary data of the Open Inference Protocol over HTTP."""

import json
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from tests.service.api.http.routes.v2_calls import (
    HEADER_LENGTH,
    IDS,
    MIXED,
    declared,
    error_of,
    infer,
    infer_binary,
    raw,
    tensor,
    vectors_of,
)
from tests.support.protocols import Clients, native_bytes
from tests.support.servers import Server


@pytest.mark.parametrize(
    "binary", [set[str](), {"input_ids"}, {"offset", "attention_mask"}, {"token_type_ids"}, set(MIXED)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_json_and_binary_inputs_can_be_mixed(
    tiny_http: httpx.Client, tiny_clients: Clients, binary: set[str], reverse: bool
) -> None:
    items = list(MIXED.items())[:: -1 if reverse else 1]
    inputs = [declared(data, name) if name in binary else tensor(name, data) for name, data in items]
    data = b"".join(raw(data) for name, data in items if name in binary)
    answer = infer_binary(tiny_http, {"inputs": inputs}, data, model="bert")
    assert vectors_of(answer).tobytes() == native_bytes(tiny_clients, "bert", MIXED).tobytes()


@pytest.mark.parametrize("whole", [None, False, True])
@pytest.mark.parametrize("one", [None, {}, {"binary_data": False}, {"binary_data": True}])
def test_output_binary_data_overrides_binary_data_output(
    tiny_http: httpx.Client, tiny_clients: Clients, whole: bool | None, one: dict[str, bool] | None
) -> None:
    more: dict[str, Any] = {} if whole is None else {"parameters": {"binary_data_output": whole}}
    if one is not None:
        more["outputs"] = [{"name": "embeddings", "parameters": one}]
    response = infer(tiny_http, tensor(), **more)
    assert (HEADER_LENGTH in response.headers) == (one or {}).get("binary_data", bool(whole))
    assert vectors_of(response).tobytes() == native_bytes(tiny_clients, "gpt", {"input_ids": IDS}).tobytes()


def test_large_response_may_mix_json_and_binary_outputs(model_server: Server) -> None:
    """The length of the text is told before it: it is computed whole, in a thread."""
    ids = np.arange(3000).reshape(100, 30)
    outputs = [
        {"name": "token_embeddings", "parameters": {"binary_data": False}},
        {"name": "embeddings", "parameters": {"binary_data": True}},
    ]
    with httpx.Client(base_url=model_server.address, timeout=60) as client:
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


@pytest.mark.parametrize(
    "length",
    ["x", "-1", "1.5", "+5", "1e3", "0x10", "", "99999999", "18446744073709551616", "9" * 5000, "٣", "1 2", "1,2"],
    ids=range(13),
)
def test_invalid_header_length_is_rejected(tiny_http: httpx.Client, length: str) -> None:
    headers = {HEADER_LENGTH.encode(): length.encode()}
    content = json.dumps({"inputs": [tensor()]})
    error = error_of(tiny_http.post("/v2/models/gpt/infer", content=content, headers=headers))
    assert error.startswith(f"{HEADER_LENGTH}: got ")
    assert error.endswith(f", expected 0 to {len(content)}, the length of the body")


@pytest.mark.parametrize("length", ["1", "10"])
def test_header_length_within_json_is_rejected(tiny_http: httpx.Client, length: str) -> None:
    assert error_of(infer_binary(tiny_http, {"inputs": [tensor()]}, b"", length)).startswith("body: not valid JSON")


@pytest.mark.parametrize("size", [-8, -1, 49, 2**31, 2**63, 2**64 - 1, "48", 48.0, True, [48], {}])
def test_invalid_binary_size_is_rejected(tiny_http: httpx.Client, size: Any) -> None:
    error = error_of(infer_binary(tiny_http, {"inputs": [declared(IDS, binary_data_size=size)]}, raw(IDS)))
    assert error.startswith("inputs[0].binary_data_size: got ")
    assert error.endswith(", expected 0 to 48, the remaining bytes")


def test_binary_sizes_beyond_body_are_rejected(tiny_http: httpx.Client) -> None:
    inputs = [declared(IDS), declared([0], "offset", binary_data_size=16)]
    error = error_of(infer_binary(tiny_http, {"inputs": inputs}, raw(IDS) + bytes(8)))
    assert error == "inputs[1].binary_data_size: got 16, expected 0 to 8, the remaining bytes"


@pytest.mark.parametrize("extra", [1, 8])
def test_undeclared_binary_bytes_are_rejected(tiny_http: httpx.Client, extra: int) -> None:
    error = error_of(infer_binary(tiny_http, {"inputs": [declared(IDS)]}, raw(IDS) + bytes(extra)))
    assert error == f"body: got {extra} bytes more, expected the bytes that binary_data_size declares"


@pytest.mark.parametrize("missing", [1, 8, 48])
def test_missing_binary_bytes_are_rejected(tiny_http: httpx.Client, missing: int) -> None:
    error = error_of(infer_binary(tiny_http, {"inputs": [declared(IDS)]}, raw(IDS)[missing:]))
    assert error.startswith("inputs[0].binary_data_size: got 48, expected 0 to ")


@pytest.mark.parametrize("size", [0, 8, 47])
def test_binary_bytes_not_filling_shape_are_rejected(tiny_http: httpx.Client, size: int) -> None:
    error = error_of(infer_binary(tiny_http, {"inputs": [declared(IDS, binary_data_size=size)]}, bytes(size)))
    assert error == f"input_ids: got {size} bytes, expected 48 bytes for shape [2, 3]"


def test_binary_data_without_header_length_is_rejected(tiny_http: httpx.Client) -> None:
    body = json.dumps({"inputs": [declared(IDS)]}).encode() + raw(IDS)
    assert error_of(tiny_http.post("/v2/models/gpt/infer", content=body)).startswith("body: not valid JSON")
