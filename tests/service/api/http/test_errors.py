"""Errors in the form of their protocol, and the one place where kinds of error meet status codes."""

import httpx
import pytest

from preblock.service.api.grpc.errors import STATUS as GRPC_STATUS
from preblock.service.api.http.errors import STATUS
from preblock.service.core import errors


def kinds(parent: type[errors.PreblockError]) -> list[type[errors.PreblockError]]:
    children = parent.__subclasses__()
    return [kind for child in children for kind in kinds(child)] if children else [parent]


@pytest.mark.parametrize("kind", kinds(errors.PreblockError))
def test_every_error_class_has_matching_status(kind: type[errors.PreblockError]) -> None:
    client = issubclass(kind, errors.ClientFault)
    assert STATUS[kind] in (range(400, 500) if client else range(500, 600))
    assert kind in GRPC_STATUS


@pytest.mark.parametrize("path", ["/nope", "/models/gpt/nope", "/model", "/livez/x", "/models//embed"])
def test_unknown_path_is_404_problem(tiny_http: httpx.Client, path: str) -> None:
    response = tiny_http.get(path)
    assert response.status_code == 404
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json() == {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": f"GET {path}: Not Found; /docs lists the paths",
        "request_id": response.headers["X-Request-Id"],
    }


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/models/gpt/embed", "POST, OPTIONS"),
        ("PUT", "/models/gpt/versions/1/embed", "POST, OPTIONS"),
        ("POST", "/models", "GET, HEAD, OPTIONS"),
        ("DELETE", "/models/gpt", "GET, HEAD, OPTIONS"),
        ("POST", "/metrics", "GET, HEAD, OPTIONS"),
    ],
)
def test_wrong_method_is_405_problem(tiny_http: httpx.Client, method: str, path: str, allow: str) -> None:
    response = tiny_http.request(method, path)
    assert response.status_code == 405
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Allow"] == allow
    assert response.json()["detail"] == f"{method} {path}: Method Not Allowed, expected {allow.split(',')[0]}"
