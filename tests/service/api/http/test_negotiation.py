"""Formats of the native API on a real server. Oracles: the safetensors library, numpy, torch, the protocol in JSON."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, Base64Chunks
from tests.service.api.http.native_requests import (
    BYTES,
    IDS,
    JSON,
    NPY,
    RAGGED,
    SAFETENSORS,
    ask,
    ask_tensors,
    octets,
    post,
    prompt_of,
    refusal,
)
from tests.support.late import safetensors_torch
from tests.support.protocols import Clients, native_raw, native_safetensors


@pytest.mark.parametrize(("shape", "rows"), [(None, [[1, 2, 3, 4, 5, 6]]), ("6", [[1, 2, 3, 4, 5, 6]]), ("2,3", IDS)])
def test_raw_ids_are_one_row_or_requested_shape(
    tiny_http: httpx.Client, shape: str | None, rows: list[list[int]]
) -> None:
    query = {} if shape is None else {"shape": shape}
    answer = post(tiny_http, "gpt", BYTES, np.arange(1, 7).astype("<i8").tobytes(), **query)
    assert answer.json() == ask(tiny_http, "gpt", input_ids=rows).json()


@pytest.mark.parametrize(
    ("kind", "body", "query", "status", "detail"),
    [
        (BYTES, bytes(9), {}, 400, "body: got 9 bytes"),
        (BYTES, b"", {}, 422, "input_ids shape: got (0,)"),
        (BYTES, bytes(48), {"shape": "2,2"}, 400, "body: got 6 values"),
        (BYTES, bytes(8), {"input_ids": "[1]"}, 422, "input_ids is both in the query and in the body; send it in"),
        (BYTES, bytes(8), {"text": '"a"'}, 422, "input_ids cannot be used with text"),
        (JSON, b'{"input_ids": [1]}', {"shape": "1"}, 422, "unknown field shape"),
        (JSON, b'{"input_ids": [1]}', {"lengths": "[1]"}, 422, "unknown field lengths"),
        (
            SAFETENSORS,
            bytes(8),
            {},
            400,
            "body: not a valid safetensors file (a header that is no JSON object), expected",
        ),
        (
            SAFETENSORS,
            b"\xff" * 20,
            {},
            400,
            "body: not a valid safetensors file (its header has 18446744073709551615 bytes, the body 20",
        ),
    ],
)
def test_invalid_binary_body_is_rejected(
    tiny_http: httpx.Client, kind: str, body: bytes, query: dict[str, str], status: int, detail: str
) -> None:
    found = refusal(post(tiny_http, "bert", kind, body, **query))
    assert (found[0], found[1][: len(detail)]) == (status, detail)


@pytest.mark.parametrize(
    ("tensors", "detail"),
    [
        ({"offset": [1]}, "input_ids, text or parts is required: rows of token ids"),
        ({"input_ids": [1.0]}, "input_ids dtype: got float64"),
        ({"input_ids": [[[1]]]}, "input_ids shape: got (1, 1, 1)"),
        ({"input_ids": [1], "dtype": [1]}, "dtype: got a tensor"),
        ({"input_ids": [1], "nope": [1]}, "unknown field nope"),
        ({"input_ids": [1], "offset": [[1]]}, "offset shape: got (1, 1)"),
        ({"input_ids": [1, 2], "lengths": [1, 2]}, "lengths: got 3 tokens in all"),
        ({"input_ids": [1, 7, 11], "lengths": [2, 1]}, "input_ids[1][0]: got 11"),
    ],
)
def test_invalid_tensors_are_rejected(tiny_http: httpx.Client, tensors: Any, detail: str) -> None:
    body = safetensors.numpy.save({name: np.array(value) for name, value in tensors.items()})
    status, found = refusal(post(tiny_http, "bert", SAFETENSORS, body))
    assert (status, found[: len(detail)]) == (422, detail)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": IDS, "offset": 2},
        {"input_ids": IDS, "offset": [2, 0]},
        {"input_ids": IDS, "position_ids": [[0, 2, 1], [7, 7, 7]], "token_type_ids": [[0, 1, 1], [1, 0, 0]]},
        {"input_ids": RAGGED, "attention_mask": [[0, 1, 1], [1], [1, 0]], "token_type_ids": [[1, 1, 0], [0], [0, 1]]},
    ],
)
def test_every_field_may_be_tensor_or_query_parameter(tiny_clients: Clients, fields: dict[str, Any]) -> None:
    expected = ask(tiny_clients.http, "bert", BYTES, **fields).content
    assert native_safetensors(tiny_clients, "bert", fields).tobytes() == expected
    assert native_raw(tiny_clients, "bert", fields).tobytes() == expected


def test_safetensors_metadata_names_model_and_version(tiny_http: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "answer.safetensors"
    file.write_bytes(ask(tiny_http, "bert", SAFETENSORS, input_ids=[1]).content)
    with safetensors.safe_open(file, "np") as answer:
        assert answer.metadata() == {"model": "bert", "version": "2", "use_as.embeddings": "input of block 0"}


def test_multiple_outputs_are_separate_tensors(tiny_http: httpx.Client) -> None:
    names = ["embeddings", "token_embeddings"]
    found = ask_tensors(tiny_http, "gpt", input_ids=RAGGED, output=names, dtype="bfloat16")
    assert found.keys() == {*names, "next_offset", "lengths"}
    for name in names:
        alone = ask(tiny_http, "gpt", BYTES, input_ids=RAGGED, output=name, dtype="bfloat16").content
        assert octets(found[name]) == alone


def test_safetensors_rows_of_text_can_be_sent_back(tiny_http: httpx.Client) -> None:
    fields: dict[str, Any] = {"text": ["a b c d e f g", "a"], "truncate": "right", "return_tokens": True}
    told, found = ask(tiny_http, "bert", **fields).json(), ask_tensors(tiny_http, "bert", **fields)
    assert octets(found["embeddings"]) == base64.b64decode(told["embeddings"])
    assert found["lengths"].tolist() == told["lengths"] == [8, 3]
    assert found["truncated"].tolist() == told["truncated"] == [1, 0]
    assert found["input_ids"].tolist() == [token for row in told["input_ids"] for token in row]
    assert found["spans"].tolist() == [span for row in told["spans"] for span in row]
    body = safetensors_torch.save({name: found[name] for name in ("input_ids", "lengths")})
    again = post(tiny_http, "bert", SAFETENSORS, body, SAFETENSORS)
    assert octets(safetensors_torch.load(again.content)["embeddings"]) == octets(found["embeddings"])


@pytest.mark.parametrize(
    ("accept", "fields", "media"),
    [
        (f"{NPY}, {BYTES};q=0.5", {"dtype": "bfloat16"}, BYTES),
        (f"{NPY}, */*;q=0.1", {"output": ["embeddings", "token_embeddings"]}, JSON),
        (f"{BYTES}, {SAFETENSORS};q=0.1", {"output": ["embeddings", "token_embeddings"]}, SAFETENSORS),
        (f"{BYTES}, {SAFETENSORS};q=0.1", {"truncate": "left"}, BYTES),
        (f"{NPY}, {SAFETENSORS};q=0.1", {"dtype": "float16"}, NPY),
    ],
)
def test_response_has_best_acceptable_media_type(
    tiny_http: httpx.Client, accept: str, fields: dict[str, Any], media: str
) -> None:
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": IDS, **fields}, headers={"Accept": accept})
    assert (response.status_code, response.headers["Content-Type"]) == (200, media)


def test_large_responses_are_complete_in_every_format(model_http: httpx.Client) -> None:
    rows = np.random.default_rng(0).integers(0, 30522, (7, 300)).tolist()
    fields: dict[str, Any] = {"input_ids": rows, "output": "token_embeddings"}
    raw = ask(model_http, "minilm", BYTES, **fields)
    assert len(raw.content) == 7 * 300 * 384 * 4 > 3 * MAX_CHUNK_BYTES
    npy, tensors = ask(model_http, "minilm", NPY, **fields), ask(model_http, "minilm", SAFETENSORS, **fields)
    encoded, prompts = (
        ask(model_http, "minilm", **fields),
        ask(model_http, "minilm", encoding="prompt_embeds", **fields),
    )
    floats = ask(model_http, "minilm", encoding="float", **fields)
    assert floats.headers["Content-Encoding"] == "gzip"  # numbers as text are, for a client that takes it
    for response in (raw, npy, tensors, encoded, prompts):
        assert int(response.headers["Content-Length"]) == len(response.content)
        assert "Transfer-Encoding" not in response.headers
    assert np.load(io.BytesIO(npy.content)).tobytes() == raw.content
    assert octets(safetensors_torch.load(tensors.content)["token_embeddings"]) == raw.content
    assert base64.b64decode(encoded.json()["token_embeddings"], validate=True) == raw.content
    assert b"".join(octets(prompt_of(text)) for text in prompts.json()["token_embeddings"]) == raw.content
    assert np.array(floats.json()["token_embeddings"], np.float32).tobytes() == raw.content


def test_disconnect_stops_chunked_response() -> None:
    sent: list[int] = []
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        sent.append(len(message.get("body", b"")))
        if len(sent) == 3:
            left.set()
        await asyncio.sleep(0)

    response = ChunkedResponse([b"x", Base64Chunks((bytes(100 * MAX_CHUNK_BYTES),))], JSON)
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(response(scope, receive, take))
    assert 0 < sum(sent) < 10 * MAX_CHUNK_BYTES
