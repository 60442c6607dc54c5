"""Null fields count as absent in every body and message. Oracle: the same request without them."""

import json
from typing import Any

import httpx
import jsonschema_rs
from websockets.sync.client import connect

from tests.support.protocols import Clients

OPTIONS = dict.fromkeys(("offset", "context", "rows", "output", "dtype", "encoding"))
STEP = dict.fromkeys(("step", "offset", "position_ids", "attention_mask", "token_type_ids", "parts", "placeholder"))
EMBEDDINGS = dict.fromkeys(("encoding_format", "dimensions", "user", "truncate", "embed_dtype"))


def test_null_fields_of_requests_are_ignored(tiny_http: httpx.Client) -> None:
    components = tiny_http.get("/openapi.json").json()["components"]
    optional = {
        (kind, name): field | {"components": components}
        for kind, schema in components["schemas"].items()
        for name, field in schema.get("properties", {}).items()
        if kind.endswith("Request") and name not in schema.get("required", [])
    }
    assert len(optional) > 40
    assert [name for name, field in optional.items() if not jsonschema_rs.is_valid(field, None)] == []
    embed = dict.fromkeys(name for kind, name in optional if kind == "EmbedRequest")
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
