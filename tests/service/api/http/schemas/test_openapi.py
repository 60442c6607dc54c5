"""The documentation served by the server."""

import json
import re
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.support.servers import Server

MODEL_ACTIONS = {"get": ("positions", "neighbours"), "post": ("embed", "bias", "decode")}
V2_ACTIONS = {"get": ("", "/ready", "/config", "/stats"), "post": ("/infer",)}
ROUTES = [
    *(("get", path) for path in ("/", "/livez", "/readyz", "/health", "/ping", "/metrics")),
    *(("get", path) for path in ("/models", "/v1/models", "/v1/models/{model}")),
    *(("get", f"/v2{path}") for path in ("", "/health/live", "/health/ready", "/models", "/models/stats")),
    *(("post", path) for path in ("/v1/embeddings", "/v2/repository/index", "/", "/tei/{static_model}")),
    *(
        (method, f"{model}/{action}")
        for method, actions in {"post": ("embed", "embed_all", "tokenize"), "get": ("info",)}.items()
        for action in actions
        for model in ("", "/tei/{static_model}")
    ),
    *(("post", f"/v2/repository/models/{{name}}/{verb}") for verb in ("load", "unload")),
    *(("get", f"/models/{{name}}{version}") for version in ("", "/versions/{version}")),
    *(
        (method, f"/models/{{name}}{version}/{action}")
        for method, actions in MODEL_ACTIONS.items()
        for action in actions
        for version in ("", "/versions/{version}")
    ),
    *(
        (method, f"/v2/models/{{name}}{version}{action}")
        for method, actions in V2_ACTIONS.items()
        for action in actions
        for version in ("", "/versions/{version}")
    ),
    *(
        (method, f"/v2/{kind}sharedmemory/{action}")
        for kind in ("system", "cuda")
        for method, action in (
            ("post", "region/{region}/register"),
            ("get", "status"),
            ("get", "region/{region}/status"),
            ("post", "unregister"),
            ("post", "region/{region}/unregister"),
        )
    ),
]
"""Method and path of every route."""
TYPES = [f"application/{kind}" for kind in ("json", "octet-stream", "x-npy", "x-safetensors")]


@pytest.fixture(scope="module")
def document(tiny_http: httpx.Client) -> Any:
    return tiny_http.get("/openapi.json").json()


def test_every_route_is_described(document: Any) -> None:
    assert sorted((method, path) for path, method, _ in operations_of(document)) == sorted(ROUTES)
    assert all(operation["description"] for _, _, operation in operations_of(document))
    assert document["security"] == [{"key": []}, {}]
    assert document["paths"]["/livez"]["get"]["security"] == []


def operations_of(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield path, method and description of each operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_operation_ids_are_short_and_unique(document: Any) -> None:
    ids = [operation["operationId"] for _, _, operation in operations_of(document)]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch("[a-z0-9_]{4,32}", name) for name in ids), ids


@pytest.fixture
def shared_key() -> Iterator[str]:
    """Create shared memory of a mebibyte, and return its name."""
    memory = SharedMemory(create=True, size=2**20)
    yield memory.name
    memory.close()
    memory.unlink()


def examples_of(operation: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the examples of an operation: of its path and its query by name, and of its bodies by media type."""
    given = [entry for entry in operation.get("parameters", ()) if "example" in entry]
    path, query = (
        {entry["name"]: entry["example"] for entry in given if entry["in"] == place} for place in ("path", "query")
    )
    bodies = operation.get("requestBody", {"content": {"": {"example": None}}})["content"]
    return path, query, {media: body["example"] for media, body in bodies.items() if "example" in body}


def test_every_openapi_example_succeeds(example_server: Server, shared_key: str) -> None:
    with httpx.Client(base_url=example_server.address, timeout=60) as client:
        operations = sorted(
            operations_of(client.get("/openapi.json").json()),
            key=lambda found: (not found[0].endswith("/unload"), not found[0].endswith("/load")),
        )
        tried = 0
        for path, method, operation in operations:
            names, query, examples = examples_of(operation)
            if "cuda" in path:
                examples = {}  # regions of a GPU are in tests/clients/shared_memory/test_regions.py
            assert examples or "cuda" in path, path
            address = path.format(**names)
            for media, example in examples.items():
                headers = {"Content-Type": media} if media else {}
                if path.endswith("/decode") and media == "application/json":
                    headers["Accept"] = "text/event-stream"
                content = example if isinstance(example, str) or example is None else json.dumps(example)
                if path.endswith("/register"):
                    content = str(content).replace(json.loads(str(content))["key"], shared_key)
                response = client.request(method.upper(), address, params=query, headers=headers, content=content)
                assert (response.status_code, '"error"' in response.text) == (200, False), (path, response.text)
                tried += 1
            if "requestBody" in operation and not path.endswith("load"):
                status = client.request(method, address).status_code
                assert (status == 200) != operation["requestBody"].get("required", False), (path, status)
    assert tried > 50


BOUNDS: list[tuple[str, str, str, list[Any]]] = [
    ("EmbedRequest", "embed", "offset", [-1, 2**63]),
    ("EmbedRequest", "embed", "input_ids", [[-1], [[]], [], [[2**63]]]),
    ("EmbedRequest", "embed", "text", ["", [], [""]]),
    ("BiasRequest", "bias", "query_length", [0, -1]),
    ("BiasRequest", "bias", "query_offset", [-1]),
]


def test_schema_bounds_match_enforced_bounds(example_server: Server, document: Any) -> None:
    requests: dict[str, dict[str, Any]] = {"embed": {"input_ids": [1]}, "bias": {"query_length": 1, "key_length": 1}}
    models = {"embed": "minilm", "bias": "t5-small"}
    components = {"components": document["components"]}
    for schema, action, field, values in BOUNDS:
        good = requests[action]
        validator = jsonschema_rs.validator_for(document["components"]["schemas"][schema] | components)
        assert validator.is_valid(good)
        for value in values:
            fields = {} if field == "text" else good
            address = f"{example_server.address}/models/{models[action]}/{action}"
            assert httpx.post(address, json=fields | {field: value}).status_code == 422, (field, value)
            assert not validator.is_valid(good | {field: value}), (field, value)


def test_embed_schema_describes_every_request_field(tiny_http: httpx.Client, document: Any) -> None:
    content = document["paths"]["/models/{name}/embed"]["post"]["requestBody"]["content"]
    fields = list(document["components"]["schemas"]["EmbedRequest"]["properties"])
    allowed = tiny_http.post("/models/gpt/embed", json={"nope": 1}).json()["expected"].split(", ")
    assert sorted(fields) == sorted(allowed)
    assert list(content) == TYPES
    described = document["paths"]["/models/{name}/embed"]["post"]
    assert list(described["responses"]["200"]["content"]) == TYPES
    parameters = ["shape", "lengths", "offset", "context", "text", "truncate", "pooling", "output", "dtype", "encoding"]
    assert [parameter["name"] for parameter in described["parameters"]] == ["name", *parameters]
    headers = {"Accept": TYPES[1]}
    binary = tiny_http.post("/models/gpt/embed", json={"input_ids": [[1], [2, 3]], "truncate": "left"}, headers=headers)
    answered = {name for name in binary.headers if name.startswith("preblock-")}
    of_some_models = {"preblock-next-context", "preblock-position-delta"}  # with n-grams, or positions of three axes
    assert {name.lower() for name in described["responses"]["200"]["headers"]} == answered | of_some_models


def test_decode_schema_describes_every_request_field(tiny_http: httpx.Client, document: Any) -> None:
    content = document["paths"]["/models/{name}/decode"]["post"]["requestBody"]["content"]
    fields = set(document["components"]["schemas"]["DecodeRequest"]["properties"])
    known = {"step"}  # a field of stream messages only
    for values in ({"nope": 1}, {"open": {"nope": 1}}):
        line = tiny_http.post("/models/gpt/decode", json=values, headers={"Content-Type": "application/x-ndjson"})
        known |= set(line.json()["error"]["expected"].split(", "))
    assert fields - {"chunk"} == known - {"step"}
    assert list(content) == ["application/x-ndjson", "application/json"]


def test_embed_schema_describes_every_response_field(tiny_http: httpx.Client, document: Any) -> None:
    both = ["embeddings", "token_embeddings"]
    answers = [
        tiny_http.post("/models/gpt/embed", json={"input_ids": [[1], [2, 3]], "output": output}).json()
        for output in (*both, both)
    ]
    text = {"text": "a", "truncate": "left", "return_tokens": True}
    answers.append(tiny_http.post("/models/bert/embed", json=text).json())
    schemas = document["components"]["schemas"]
    of_some_models = {"next_context", "position_delta"}  # with n-grams, or positions of three axes
    assert set(schemas["EmbedAnswer"]["properties"]) == set().union(*answers) | of_some_models
    assert set(schemas["OutputDescription"]["properties"]) == set(answers[2]["outputs"]["embeddings"])


def test_schemas_describe_every_field_of_responses(tiny_http: httpx.Client, document: Any) -> None:
    described = document["components"]["schemas"]["EmbeddingsRequest"]
    refused = tiny_http.post("/v1/embeddings", json={"nope": 1}).json()
    assert sorted(described["properties"]) == sorted(refused["error"]["message"].partition("expected ")[2].split(", "))
    fields = {"model": "gpt", "input": [1], "pooling": "none", "truncate_prompt_tokens": 3}
    answer = tiny_http.post("/v1/embeddings", json=fields).json()
    shown = {
        "EmbeddingsAnswer": answer,
        "Embedding": answer["data"][0],
        "Usage": answer["usage"],
        "OpenAIError": refused,
        "OpenAIErrorDetails": tiny_http.post("/v1/embeddings", json=fields | {"input": [7]}).json()["error"],
        "ModelDescription": tiny_http.get("/models/gpt").json(),
        "Problem": tiny_http.post("/models/gpt/embed", json={"input_ids": [7]}).json(),
    }
    schemas = document["components"]["schemas"]
    assert {name: set(schemas[name]["properties"]) for name in shown} == {name: set(shown[name]) for name in shown}
