"""Null fields count as absent in every body and message. Oracle: the same request without them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
from websockets.sync.client import connect

from tests.support.protocols import Clients

EVENTS = {"Accept": "text/event-stream"}
OPTIONS = dict.fromkeys(("offset", "context", "rows", "output", "dtype", "encoding"))
STEP = dict.fromkeys(("step", "offset", "position_ids", "attention_mask", "token_type_ids", "parts", "placeholder"))


def optional_fields(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and JSON Schema of each optional field of a body."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "$ref" in schema:
                schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            for name, described in schema.get("properties", {}).items():
                if name not in schema.get("required", []):
                    yield path, name, described | {"components": document["components"]}


def test_schemas_allow_null_in_optional_fields(tiny_http: httpx.Client) -> None:
    found = list(optional_fields(tiny_http.get("/openapi.json").json()))
    assert len({name for _, name, _ in found}) > 20
    assert [(path, name) for path, name, schema in found if not jsonschema_rs.is_valid(schema, None)] == []


def test_embed_ignores_null_fields(tiny_http: httpx.Client) -> None:
    fields = [
        name for path, name, _ in optional_fields(tiny_http.get("/openapi.json").json()) if path.endswith("}/embed")
    ]
    plain, nulls = {"input_ids": [1]}, dict.fromkeys(fields)
    assert len(fields) > 10
    for query in ("", "?offset=null"):
        answer = tiny_http.post(f"/models/bert/embed{query}", json=nulls | plain)
        assert answer.json() == tiny_http.post("/models/bert/embed", json=plain).json()
    assert tiny_http.post("/models/gpt/embed?offset=2", json=plain | {"offset": None}).json()["next_offset"] == [3]


def test_parts_ignore_null_fields(tiny_http: httpx.Client) -> None:
    plain = tiny_http.post("/models/gpt/embed", json={"parts": [{"input_ids": [1]}]})
    nulls = {"parts": [{"input_ids": [1], "text": None, "other": None}]}
    assert tiny_http.post("/models/gpt/embed", json=nulls).json() == plain.json()


def test_embeddings_ignore_null_fields(tiny_http: httpx.Client) -> None:
    plain = {"model": "gpt", "input": [1], "pooling": "mean"}
    nulls = dict.fromkeys(("encoding_format", "dimensions", "user", "truncate", "embed_dtype"))
    assert (
        tiny_http.post("/v1/embeddings", json=plain | nulls).json()
        == tiny_http.post("/v1/embeddings", json=plain).json()
    )


def test_events_ignore_null_fields(tiny_http: httpx.Client) -> None:
    plain = {"input_ids": [1, 2]}
    whole = tiny_http.post("/models/gpt/decode", json=plain, headers=EVENTS)
    assert "event: end" in whole.text
    given = tiny_http.post("/models/gpt/decode", json=STEP | OPTIONS | {"chunk": None} | plain, headers=EVENTS)
    assert given.text == whole.text


def test_stream_messages_ignore_null_fields(tiny_clients: Clients) -> None:
    with connect(f"{tiny_clients.socket}/models/bert/decode?offset=2") as stream:

        def ask(document: Any) -> Any:
            stream.send(json.dumps(document))
            return json.loads(stream.recv())

        assert ask({"open": OPTIONS, "step": None})["next_offset"] == [2]
        answer = ask(STEP | {"input_ids": [1], "ping": None})
        assert answer == tiny_clients.http.post("/models/bert/embed", json={"input_ids": [1], "offset": 2}).json()
        assert ask({"append": [0], "context": None, "step": None}) == {"next_offset": [3, 0]}


def test_null_body_is_named_in_the_error(tiny_http: httpx.Client) -> None:
    detail = tiny_http.post("/models/gpt/embed", content=b"null").json()["detail"]
    assert detail == "body: got null, expected a JSON object"
