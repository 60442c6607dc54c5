"""The application is valid ASGI: other servers run it, and every route answers.

Oracle: NumPy over the raw tables.
"""

import gzip
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

from tests.service.matrix.code_paths import PLAIN, UVICORN, CodePath
from tests.support.artifacts import read_tables
from tests.support.servers import ASGI_SERVERS, Server, serve_asgi

IDS = np.array([[1, 6, 0]])


@pytest.fixture(scope="module", params=ASGI_SERVERS)
def asgi_server(request: pytest.FixtureRequest, wide_repository: Path) -> Iterator[Server]:
    """Serve the application with one of the ASGI servers."""
    with serve_asgi(request.param, wide_repository) as server:
        yield server


@pytest.fixture(scope="module")
def expected(wide_repository: Path) -> bytes:
    """Return the vectors of IDS."""
    tables = read_tables(wide_repository / "gpt" / "1")
    return bytes((tables["tokens"][IDS] + tables["positions"][:3]).tobytes())


GETS = (
    *("/", "/livez", "/readyz", "/metrics", "/docs", "/openapi.json"),
    *("/models", "/models/gpt", "/models/gpt/versions/1"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/gpt", "/v2/models/gpt/ready", "/v2/models/gpt/stats"),
    *("/v2/models/gpt/versions/1", "/v1/models"),
)


@pytest.mark.parametrize("path", GETS)
def test_get_route_returns_200(asgi_server: Server, path: str) -> None:
    assert httpx.get(asgi_server.address + path, timeout=60).status_code == 200


@pytest.mark.parametrize("path", GETS)
def test_head_has_the_headers_of_get(asgi_server: Server, path: str) -> None:
    """The metrics change between two requests, and so does their length."""
    varying = {"date", "x-request-id"} | ({"content-length"} if path in ("/metrics", "/v2/models/gpt/stats") else set())
    with httpx.Client(base_url=asgi_server.address, timeout=60) as client:
        head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.keys() == get.headers.keys()
    assert all(head.headers[name] == get.headers[name] for name in get.headers.keys() - varying)


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/", "GET, HEAD, POST, OPTIONS"),
        *((path, "GET, HEAD, OPTIONS") for path in ("/livez", "/docs", "/models/gpt", "/v2/health/ready")),
        *((path, "POST, OPTIONS") for path in ("/models/gpt/embed", "/v1/embeddings", "/v2/models/gpt/infer")),
    ],
)
def test_options_lists_allowed_methods(asgi_server: Server, path: str, allow: str) -> None:
    answer = httpx.options(asgi_server.address + path, timeout=60)
    assert (answer.status_code, answer.headers["Allow"], answer.content) == (204, allow, b"")


@pytest.mark.parametrize("path", ["/nowhere", "/livez", "/models/gpt/decode/", "/models/gpt/embed"])
def test_websocket_of_wrong_path_is_not_found(asgi_server: Server, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect_socket(asgi_server.socket + path):
        pass
    response = refused.value.response
    assert (response.status_code, response.headers["Content-Type"]) == (404, "application/problem+json")
    assert json.loads(response.body or b"")["detail"] == f"GET {path}: Not Found; /docs lists the paths"


IDS_TENSOR = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/gpt/embed", {"input_ids": [1]}),
        ("/v1/embeddings", {"model": "gpt", "input": [1], "pooling": "mean"}),
        ("/v2/models/gpt/infer", {"inputs": [IDS_TENSOR]}),
        ("/v2/repository/index", {}),
    ],
)
def test_json_body_needs_no_content_type(asgi_server: Server, path: str, body: object, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(asgi_server.address + path, content=json.dumps(body), headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "X-GZIP"])
def test_both_gzip_encoding_names_are_accepted(asgi_server: Server, coding: str) -> None:
    content = gzip.compress(b'{"input_ids": [1]}')
    headers = {"Content-Encoding": coding}
    assert httpx.post(f"{asgi_server.address}/models/gpt/embed", content=content, headers=headers).status_code == 200


def test_index_lists_working_paths(asgi_server: Server) -> None:
    index = httpx.get(asgi_server.address).json()
    assert (index["name"], index["version"], index["protocols"]["grpc_port"]) == ("preblock", version("preblock"), None)
    for path in (index["docs"], index["openapi"], index["models"], index["metrics"], *index["health"].values()):
        assert httpx.get(asgi_server.address + path, timeout=60).status_code == 200
    native = index["protocols"]["native"].format(name="gpt")
    assert httpx.post(asgi_server.address + native, json={"input_ids": [1]}).status_code == 200


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_vectors_equal_the_tables(asgi_server: Server, path: CodePath, expected: bytes) -> None:
    with path.open({UVICORN: asgi_server}) as caller:
        for _ in range(3):
            assert caller.ask(IDS).content == expected
        assert caller.ask(-IDS).status in (400, 422)  # 400 over V2
        assert caller.ask(IDS, model="none").status == 404
