"""Errors of paths and methods."""

import httpx


def test_unknown_path_or_method_is_a_problem(tiny_http: httpx.Client) -> None:
    for method, path, allow in (
        *(("GET", path, None) for path in ("/nope", "/models/gpt/nope", "/model", "/livez/x", "/models//embed")),
        ("GET", "/models/gpt/embed", "POST, OPTIONS"),
        ("PUT", "/models/gpt/versions/1/embed", "POST, OPTIONS"),
        *((verb, path, "GET, HEAD, OPTIONS") for verb, path in (("POST", "/models"), ("DELETE", "/models/gpt"))),
        ("POST", "/metrics", "GET, HEAD, OPTIONS"),
    ):
        response = tiny_http.request(method, path)
        assert response.status_code == (405 if allow else 404)
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
