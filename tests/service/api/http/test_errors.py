"""Errors in the form of their protocol, and the one place where kinds of error meet status codes."""

import httpx

from preblock.service.api.grpc.errors import STATUS as GRPC_STATUS
from preblock.service.api.http.errors import STATUS
from preblock.service.core import errors


def kinds(parent: type[errors.PreblockError]) -> list[type[errors.PreblockError]]:
    children = parent.__subclasses__()
    return [kind for child in children for kind in kinds(child)] if children else [parent]


def test_every_error_class_has_matching_status() -> None:
    for kind in kinds(errors.PreblockError):
        client = issubclass(kind, errors.ClientFault)
        assert STATUS[kind] in (range(400, 500) if client else range(500, 600)), kind
        assert kind in GRPC_STATUS


def test_unknown_path_or_method_is_a_problem(tiny_http: httpx.Client) -> None:
    for method, path, allow in (
        *(("GET", path, None) for path in ("/nope", "/models/gpt/nope", "/model", "/livez/x", "/models//embed")),
        ("GET", "/models/gpt/embed", "POST, OPTIONS"),
        ("PUT", "/models/gpt/versions/1/embed", "POST, OPTIONS"),
        *((verb, path, "GET, HEAD, OPTIONS") for verb, path in (("POST", "/models"), ("DELETE", "/models/gpt"))),
        ("POST", "/metrics", "GET, HEAD, OPTIONS"),
    ):
        response = tiny_http.request(method, path)
        title = "Not Found" if allow is None else "Method Not Allowed"
        hint = "; /docs lists the paths" if allow is None else f", expected {allow.split(',')[0]}"
        assert (response.headers["Content-Type"], response.headers.get("Allow")) == ("application/problem+json", allow)
        assert response.json() == {
            "type": "about:blank",
            "title": title,
            "status": response.status_code,
            "detail": f"{method} {path}: {title}{hint}",
            "request_id": response.headers["X-Request-Id"],
        }
        assert response.status_code == (405 if allow else 404)
