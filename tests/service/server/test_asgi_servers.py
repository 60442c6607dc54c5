"""The application is valid ASGI: other servers run it, and every route answers.

Oracle: NumPy over the raw tables.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from tests.service.matrix.bodies import step_frame, write_native
from tests.service.matrix.code_paths import PLAIN, UVICORN, CodePath
from tests.support.artifacts import read_tables
from tests.support.servers import ASGI_SERVERS, Server, serve_asgi

IDS = np.array([[1, 6, 0]])


@pytest.fixture(scope="module", params=ASGI_SERVERS)
def server(request: pytest.FixtureRequest, wide_repository: Path) -> Iterator[Server]:
    """Serve the application with one of the ASGI servers."""
    with serve_asgi(request.param, wide_repository) as server:
        yield server


@pytest.fixture(scope="module")
def expected(wide_repository: Path) -> bytes:
    """Return the vectors of IDS."""
    tables = read_tables(wide_repository / "gpt" / "1")
    return bytes((tables["tokens"][IDS] + tables["positions"][:3]).tobytes())


GETS = (
    *("/livez", "/readyz", "/metrics", "/docs", "/openapi.json", "/models", "/models/gpt", "/models/gpt/versions/1"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/gpt", "/v2/models/gpt/ready", "/v2/models/gpt/stats"),
    *("/v2/models/gpt/versions/1", "/v1/models"),
)


@pytest.mark.parametrize("path", GETS)
def test_get_is_answered(server: Server, path: str) -> None:
    assert httpx.get(server.address + path, timeout=60).status_code == 200


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_vectors_equal_the_tables(server: Server, path: CodePath, expected: bytes) -> None:
    with path.open({UVICORN: server}) as caller:
        for _ in range(3):
            assert caller.ask(IDS).content == expected
        assert caller.ask(-IDS).status in (400, 422)  # 400 over V2
        assert caller.ask(IDS, model="none").status == 404


def test_test_client_reaches_every_protocol(wide_repository: Path, expected: bytes) -> None:
    with TestClient(create_app(Settings(repository=wide_repository))) as client:
        for get in GETS:
            assert client.get(get).status_code == 200
        path, headers, body = write_native(IDS, 0, "gpt")
        assert client.post(path, content=body, headers=headers).content == expected
        with client.websocket_connect("/models/gpt/decode") as stream:
            stream.send_bytes(step_frame(IDS))
            assert stream.receive_bytes().endswith(expected)
            stream.send_text('{"input_ids": [6]}')
            assert json.loads(stream.receive_text())["next_offset"] == [4]
