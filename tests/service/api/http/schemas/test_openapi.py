"""The documentation served by the server."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

ROUTES = {
    "/models/{name}/embed": "post",
    "/models/{name}/versions/{version}/embed": "post",
    "/models/{name}/bias": "post",
    "/models/{name}/versions/{version}/bias": "post",
    "/models/{name}/decode": "post",
    "/models/{name}/versions/{version}/decode": "post",
    "/models": "get",
    "/models/{name}": "get",
    "/models/{name}/versions/{version}": "get",
    "/v2": "get",
    "/v2/health/live": "get",
    "/v2/health/ready": "get",
    "/v2/models": "get",
    "/v2/models/stats": "get",
    "/v2/models/{name}/stats": "get",
    "/v2/models/{name}/versions/{version}/stats": "get",
    "/v2/models/{name}": "get",
    "/v2/models/{name}/versions/{version}": "get",
    "/v2/models/{name}/ready": "get",
    "/v2/models/{name}/versions/{version}/ready": "get",
    "/v2/models/{name}/config": "get",
    "/v2/models/{name}/versions/{version}/config": "get",
    "/v2/models/{name}/infer": "post",
    "/v2/models/{name}/versions/{version}/infer": "post",
    "/v2/repository/index": "post",
    "/v2/repository/models/{name}/load": "post",
    "/v2/repository/models/{name}/unload": "post",
    "/v1/embeddings": "post",
    "/v1/models": "get",
    "/v1/models/{model}": "get",
    "/livez": "get",
    "/readyz": "get",
    "/metrics": "get",
}

TYPES = [f"application/{kind}" for kind in ("json", "octet-stream", "x-npy", "x-safetensors")]


@pytest.fixture(scope="module")
def document(tiny: httpx.Client) -> Any:
    return tiny.get("/openapi.json").json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for child in value.values():
            yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)


def test_docs_is_a_page_of_the_document(tiny: httpx.Client) -> None:
    response = tiny.get("/docs")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/html")
    assert "/openapi.json" in response.text


def test_every_route_is_described(document: Any) -> None:
    assert {path: next(iter(methods)) for path, methods in document["paths"].items()} == ROUTES
    assert all(method["description"] for methods in document["paths"].values() for method in methods.values())


def test_every_reference_of_the_document_exists(document: Any) -> None:
    for reference in references(document):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_operation_ids_are_unique(document: Any) -> None:
    ids = [method["operationId"] for methods in document["paths"].values() for method in methods.values()]
    assert len(ids) == len(set(ids))


def test_embed_describes_every_field_that_is_read(tiny: httpx.Client, document: Any) -> None:
    content = document["paths"]["/models/{name}/embed"]["post"]["requestBody"]["content"]
    fields = list(document["components"]["schemas"]["EmbedRequest"]["properties"])
    allowed = tiny.post("/models/gpt/embed", json={"nope": 1}).json()["expected"].split(", ")
    assert sorted(fields) == sorted(allowed)
    assert list(content) == TYPES
    described = document["paths"]["/models/{name}/embed"]["post"]
    assert list(described["responses"]["200"]["content"]) == TYPES
    assert [parameter["name"] for parameter in described["parameters"]] == ["name", "shape", "lengths"]


def test_decode_describes_every_field_that_is_read(tiny: httpx.Client, document: Any) -> None:
    content = document["paths"]["/models/{name}/decode"]["post"]["requestBody"]["content"]
    fields = set(document["components"]["schemas"]["DecodeRequest"]["properties"])
    known = {"step"}  # a field of stream messages only
    for values in ({"nope": 1}, {"open": {"nope": 1}}):
        line = tiny.post("/models/gpt/decode", json=values, headers={"Content-Type": "application/x-ndjson"})
        known |= set(line.json()["error"]["expected"].split(", "))
    assert fields - {"chunk"} == known - {"step"}
    assert list(content) == ["application/x-ndjson", "application/json"]


def test_embed_describes_every_field_that_is_answered(tiny: httpx.Client, document: Any) -> None:
    both = ["embeddings", "token_embeddings"]
    answers = [
        tiny.post("/models/gpt/embed", json={"input_ids": [[1], [2, 3]], "output": output}).json()
        for output in (*both, both)
    ]
    text = {"text": "a", "truncate": "left", "return_tokens": True}
    answers.append(tiny.post("/models/bert/embed", json=text).json())
    schemas = document["components"]["schemas"]
    assert set(schemas["EmbedAnswer"]["properties"]) == set().union(*answers)
    assert set(schemas["OutputDescription"]["properties"]) == set(answers[2]["outputs"]["embeddings"])


def test_embeddings_describes_every_field(tiny: httpx.Client, document: Any) -> None:
    described = document["components"]["schemas"]["EmbeddingsRequest"]
    refused = tiny.post("/v1/embeddings", json={"nope": 1}).json()
    assert sorted(described["properties"]) == sorted(refused["error"]["message"].partition("expected ")[2].split(", "))
    fields = {"model": "gpt", "input": [1], "pooling": "none", "truncate": "left"}
    answer = tiny.post("/v1/embeddings", json=fields).json()
    shown = {
        "EmbeddingsAnswer": answer,
        "Embedding": answer["data"][0],
        "Usage": answer["usage"],
        "OpenAIError": refused,
        "OpenAIErrorDetails": refused["error"],
    }
    schemas = document["components"]["schemas"]
    assert {name: set(schemas[name]["properties"]) for name in shown} == {name: set(shown[name]) for name in shown}


def test_a_model_is_described_as_it_is_shown(tiny: httpx.Client, document: Any) -> None:
    assert set(document["components"]["schemas"]["ModelDescription"]["properties"]) == set(
        tiny.get("/models/gpt").json()
    )


def test_a_problem_is_described_as_it_is_answered(tiny: httpx.Client, document: Any) -> None:
    problem = tiny.post("/models/gpt/embed", json={}).json()
    assert set(document["components"]["schemas"]["Problem"]["properties"]) == set(problem)


def test_the_documentation_needs_no_other_server(tiny: httpx.Client) -> None:
    parts = re.findall(r'(?:href|src)="([^"]+)"', tiny.get("/docs").text)
    assert len(parts) == 3
    for part in parts:
        assert part.startswith("/docs/static/")
        assert tiny.get(part).status_code == 200
