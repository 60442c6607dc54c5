"""Requests and answers of every native format. Oracles: numpy, safetensors, the JSON answer."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from preblock.service.codecs.chunks import MAX_CHUNK_BYTES
from tests.service.api.http.native_requests import (
    BYTES,
    JSON,
    NPY,
    RAGGED,
    SAFETENSORS,
    Vectors,
    ask,
    ask_tensors,
    octets,
    post,
    post_json,
    prompt_of,
    told,
    vectors_of,
)
from tests.support.late import safetensors_torch

ROWS = [[1, 2, 3], [4]]
BOTH = ["embeddings", "token_embeddings"]


def npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def send(http: httpx.Client, accept: str, kind: str, fields: dict[str, Any]) -> httpx.Response:
    """Send rows of ids as the content type `kind` with all other fields in the query, or everything as JSON."""
    if kind == JSON:
        return ask(http, "bert", accept, **fields)
    query = {
        name: value if name in ("pooling", "truncate") else json.dumps(value)
        for name, value in fields.items()
        if name != "input_ids"
    }
    content = b""
    if rows := fields.get("input_ids"):
        ids = np.concatenate(rows).astype("<i8")
        query["lengths"] = json.dumps(list(map(len, rows)))
        content = {BYTES: ids.tobytes(), NPY: npy(ids), SAFETENSORS: safetensors.numpy.save({"input_ids": ids})}[kind]
    return post(http, "bert", kind, content, accept, **query)


def read(response: httpx.Response, rows: int) -> tuple[Vectors, dict[str, list[int] | None]]:
    """Return the vectors of an answer, and its numbers for each row; one number of a header stands for all rows."""
    names = ("next_offset", "lengths", "truncated")
    media = response.headers["Content-Type"]
    if media == JSON:
        document = response.json()
        return vectors_of(document), {name: document.get(name) for name in names}
    if media == SAFETENSORS:
        tensors = safetensors.numpy.load(response.content)
        return tensors["embeddings"], {name: tensors[name].tolist() if name in tensors else None for name in names}
    shape = list(map(int, response.headers["Preblock-Shape"].split(",")))
    vectors = np.load(io.BytesIO(response.content)) if media == NPY else np.frombuffer(response.content, "<f4")
    found: dict[str, list[int] | None] = {}
    for name in names:
        text = response.headers.get(f"Preblock-{name.replace('_', '-')}")
        found[name] = text and np.broadcast_to([*map(int, text.split(","))], rows).tolist()
    return vectors.reshape(shape), found


@pytest.mark.parametrize("accept", [JSON, BYTES, NPY, SAFETENSORS])
@pytest.mark.parametrize("kind", [JSON, BYTES, NPY, SAFETENSORS])
def test_every_format_holds_same_response(tiny_http: httpx.Client, accept: str, kind: str) -> None:
    requests: list[dict[str, Any]] = [
        {"input_ids": ROWS, "offset": [2, 0], "attention_mask": [[0, 1, 1], [1]], "token_type_ids": [[1, 1, 0], [0]]},
        {"input_ids": [*ROWS, [1] * 9], "truncate": "right"},
        {"input_ids": ROWS, "pooling": "last", "offset": [1, 0]},
        {"text": ["a b c", "a"]},
        {"text": ["a b c d e f g", "a"], "truncate": "left"},
        {"text": "a b c", "pooling": "mean"},
    ]
    for fields in requests:
        rows = fields.get("input_ids") or fields["text"]
        count = 1 if isinstance(rows, str) else len(rows)
        answer = send(tiny_http, accept, kind, fields)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, accept), answer.text
        vectors, found = read(answer, count)
        expected, numbers = read(ask(tiny_http, "bert", **fields), count)
        assert (vectors.tobytes(), vectors.shape) == (expected.tobytes(), expected.shape), fields
        if accept == SAFETENSORS and numbers["lengths"] is None:
            assert len(set(found.pop("lengths") or [])) == 1  # a file always holds the lengths
            del numbers["lengths"]
        assert found == numbers, fields


def test_safetensors_hold_outputs_and_metadata(tiny_http: httpx.Client, tmp_path: Path) -> None:
    file = tmp_path / "answer.safetensors"
    file.write_bytes(ask(tiny_http, "gpt", SAFETENSORS, input_ids=RAGGED, output=BOTH, dtype="bfloat16").content)
    uses = {"embeddings": "input of block 0", "token_embeddings": "inputs_embeds or prompt_embeds of a model"}
    several = told(tiny_http, "gpt", input_ids=RAGGED, output=BOTH)["outputs"]
    assert {name: output["use_as"] for name, output in several.items()} == uses
    with safetensors.safe_open(file, "pt") as answer:
        expected = {"model": "gpt", "version": "1"} | {f"use_as.{name}": use for name, use in uses.items()}
        assert (answer.metadata(), set(answer.keys())) == (expected, {*BOTH, "next_offset", "lengths"})
        for name in BOTH:
            alone = ask(tiny_http, "gpt", BYTES, input_ids=RAGGED, output=name, dtype="bfloat16").content
            assert octets(answer.get_tensor(name)) == alone


def test_safetensors_rows_of_text_can_be_sent_back(tiny_http: httpx.Client) -> None:
    fields: dict[str, Any] = {"text": ["a b c d e f g", "a"], "truncate": "right", "return_tokens": True}
    document, found = told(tiny_http, "bert", **fields), ask_tensors(tiny_http, "bert", **fields)
    assert octets(found["embeddings"]) == base64.b64decode(document["embeddings"])
    assert found["lengths"].tolist() == document["lengths"] == [8, 3]
    assert found["truncated"].tolist() == document["truncated"] == [1, 0]
    assert found["input_ids"].tolist() == [token for row in document["input_ids"] for token in row]
    assert found["spans"].tolist() == [span for row in document["spans"] for span in row]
    body = safetensors_torch.save({name: found[name] for name in ("input_ids", "lengths")})
    again = post(tiny_http, "bert", SAFETENSORS, body, SAFETENSORS)
    assert octets(safetensors_torch.load(again.content)["embeddings"]) == octets(found["embeddings"])


def test_large_responses_are_complete_in_every_format(model_http: httpx.Client) -> None:
    rows = np.random.default_rng(0).integers(0, 30522, (7, 300)).tolist()
    fields: dict[str, Any] = {"input_ids": rows, "output": "token_embeddings"}
    raw, array, tensors = (ask(model_http, "minilm", accept, **fields) for accept in (BYTES, NPY, SAFETENSORS))
    encoded, prompts, floats = (
        ask(model_http, "minilm", encoding=encoding, **fields) for encoding in ("base64", "prompt_embeds", "float")
    )
    assert len(raw.content) == 7 * 300 * 384 * 4 > 3 * MAX_CHUNK_BYTES
    assert floats.headers["Content-Encoding"] == "gzip"  # numbers as text are, for a client that takes it
    for response in (raw, array, tensors, encoded, prompts):
        assert int(response.headers["Content-Length"]) == len(response.content)
        assert "Transfer-Encoding" not in response.headers
    assert np.load(io.BytesIO(array.content)).tobytes() == raw.content
    assert octets(safetensors_torch.load(tensors.content)["token_embeddings"]) == raw.content
    assert base64.b64decode(encoded.json()["token_embeddings"], validate=True) == raw.content
    assert b"".join(octets(prompt_of(text)) for text in prompts.json()["token_embeddings"]) == raw.content
    assert np.array(floats.json()["token_embeddings"], np.float32).tobytes() == raw.content


ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, JSON),
    ("APPLICATION/X-NPY", {}, NPY),
    (f"{JSON};q=0.5, {NPY};q=0.4, {BYTES};q=0.6", {}, BYTES),
    (f"{JSON};q=0, {BYTES};q=0, */*;q=0.001", {}, NPY),
    (f"application/*;q=0.1, {NPY};q=0.2", {}, NPY),
    (f"{JSON}; charset=utf-8", {}, JSON),
    (f"{BYTES} ; q=1.0 , {NPY}\t;\tq=0.9", {}, BYTES),
    (f"{NPY}, {BYTES};q=0.5", {"dtype": "bfloat16"}, BYTES),
    (f"{NPY}, */*;q=0.1", {"output": BOTH}, JSON),
    (f"{BYTES}, {SAFETENSORS};q=0.1", {"output": BOTH}, SAFETENSORS),
    (f"{BYTES}, {SAFETENSORS};q=0.1", {"truncate": "left"}, BYTES),
]


def test_response_format_follows_accept(tiny_http: httpx.Client) -> None:
    for accept, fields, media in ACCEPTED:
        response = post_json(tiny_http, "gpt", accept, input_ids=[1], **fields)
        assert (response.status_code, response.headers["Content-Type"]) == (200, media), (accept, fields)
    for accept in ("text/html", f"{JSON};q=0", "*/*;q=0", "image/*", f"{JSON};q=x", f"{JSON};q=2"):
        response = post_json(tiny_http, "gpt", accept, input_ids=[1])
        problem = response.json()
        assert (problem["status"], problem["title"], problem["got"]) == (406, "NotAcceptable", accept)
    lines = [("Accept", "text/html"), ("Accept", NPY)]
    response = tiny_http.post("/models/gpt/embed", json={"input_ids": [1]}, headers=lines)
    assert response.headers["Content-Type"] == NPY
