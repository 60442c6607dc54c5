"""The application is valid ASGI: other servers run it, and every route answers.

Oracle: NumPy over the raw tables.
"""

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


def test_websocket_of_wrong_path_is_not_found(asgi_server: Server) -> None:
    for path in ("/nowhere", "/livez", "/models/gpt/decode/", "/models/gpt/embed"):
        with pytest.raises(InvalidStatus) as refused, connect_socket(asgi_server.socket + path):
            pass
        response = refused.value.response
        assert (response.status_code, response.headers["Content-Type"]) == (404, "application/problem+json")
        assert json.loads(response.body or b"")["detail"] == f"GET {path}: Not Found; /docs lists the paths"


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
