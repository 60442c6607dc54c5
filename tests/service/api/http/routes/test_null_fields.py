"""Null fields count as absent in every body and message. Oracle: the same request without them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
from websockets.sync.client import connect

from tests.support.protocols import Clients

OPTIONS = dict.fromkeys(("offset", "context", "rows", "output", "dtype", "encoding"))
STEP = dict.fromkeys(("step", "offset", "position_ids", "attention_mask", "token_type_ids", "parts", "placeholder"))
EMBEDDINGS = dict.fromkeys(("encoding_format", "dimensions", "user", "truncate", "embed_dtype"))


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


def test_null_fields_of_requests_are_ignored(tiny_http: httpx.Client) -> None:
    optional = list(optional_fields(tiny_http.get("/openapi.json").json()))
    assert len({name for _, name, _ in optional}) > 20
    assert [(path, name) for path, name, schema in optional if not jsonschema_rs.is_valid(schema, None)] == []
    embed = dict.fromkeys(name for path, name, _ in optional if path.endswith("}/embed"))
    ids, part = {"input_ids": [1, 2]}, {"input_ids": [1]}
    requests: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/models/bert/embed", ids, embed | ids),
        ("/models/gpt/embed", {"parts": [part]}, {"parts": [part | {"text": None, "other": None}]}),
        ("/models/gpt/embed?offset=2", ids, {"offset": None}),
        ("/models/bert/embed?offset=null", ids, {}),
        ("/v1/embeddings", {"model": "gpt", "input": [1], "pooling": "mean"}, EMBEDDINGS),
        ("/models/gpt/decode", ids, STEP | OPTIONS | {"chunk": None} | ids),
    ]
    for path, plain, nulls in requests:
        headers = {"Accept": "text/event-stream" if path.endswith("decode") else "*/*"}
        expected = tiny_http.post(path, json=plain, headers=headers)
        found = tiny_http.post(path, json=plain | nulls, headers=headers)
        assert (expected.status_code, found.text) == (200, expected.text), path


def test_stream_messages_ignore_null_fields(tiny_clients: Clients) -> None:
    with connect(f"{tiny_clients.socket}/models/bert/decode?offset=2") as stream:

        def ask(document: Any) -> Any:
            stream.send(json.dumps(document))
            return json.loads(stream.recv())

        assert ask({"open": OPTIONS, "step": None})["next_offset"] == [2]
        answer = ask(STEP | {"input_ids": [1], "ping": None})
        assert answer == tiny_clients.http.post("/models/bert/embed", json={"input_ids": [1], "offset": 2}).json()
        assert ask({"append": [0], "context": None, "step": None}) == {"next_offset": [3, 0]}
