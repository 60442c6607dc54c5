"""The application is valid ASGI: starlette's client runs it. Oracle: NumPy over the raw tables.

Servers of others run it in tests/e2e/test_asgi_servers.py.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from preblock.service.app import create_app
from preblock.service.core.settings import Settings

GETS = (
    *("/", "/livez", "/readyz", "/metrics", "/docs", "/openapi.json"),
    *("/models", "/models/gpt", "/models/gpt/versions/1"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/gpt", "/v2/models/gpt/ready", "/v2/models/gpt/stats"),
    *("/v2/models/gpt/versions/1", "/v1/models"),
)
FILE = "/docs/static/swagger-ui.css"


@pytest.fixture(scope="module")
def client(wide_repository: Path) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(repository=wide_repository))) as client:
        yield client


def test_head_has_the_headers_of_get(client: TestClient) -> None:
    """The metrics change between two requests, and so does their length."""
    for path in GETS:
        varying = {"x-request-id", *(["content-length"] if path in ("/metrics", "/v2/models/gpt/stats") else [])}
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content, get.status_code) == (200, b"", 200), path
        assert head.headers.keys() == get.headers.keys()
        assert all(head.headers[name] == get.headers[name] for name in get.headers.keys() - varying), path


def test_options_lists_allowed_methods(client: TestClient) -> None:
    for path, allow in (
        ("/", "GET, HEAD, POST, OPTIONS"),
        *((path, "GET, HEAD, OPTIONS") for path in ("/livez", "/docs", "/models/gpt", "/v2/health/ready", FILE)),
        *((path, "POST, OPTIONS") for path in ("/models/gpt/embed", "/v1/embeddings", "/v2/models/gpt/infer")),
    ):
        answer = client.options(path)
        assert (answer.status_code, answer.headers["Allow"], answer.content) == (204, allow, b""), path


@pytest.mark.parametrize("lifespan", [True, False])
def test_server_without_lifespan_is_logged_once(
    wide_repository: Path, lifespan: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`TestClient` runs the lifespan only in a `with` block."""
    client = TestClient(create_app(Settings(repository=wide_repository)))
    with client if lifespan else nullcontext(), caplog.at_level(logging.WARNING):
        assert [client.get("/models").status_code for _ in range(2)] == [200, 200]
    assert caplog.text.count("runs no lifespan, so changed API keys") == (0 if lifespan else 1)
