"""The application is valid ASGI: other servers run it, and every route answers.

Oracle: NumPy over the raw tables.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient
from websockets import InvalidStatus
from websockets.sync.client import connect

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from tests.support.paths import ROOT
from tests.support.protocols import FRAME, VECTORS, step_frame
from tests.support.servers import free_port

APPLICATION = "tests.support.asgi_app:create"
SERVERS = {
    "uvicorn-httptools": ["uvicorn", "--factory", "--http", "httptools", "--ws", "websockets-sansio", APPLICATION],
    "uvicorn-h11": ["uvicorn", "--factory", "--http", "h11", "--ws", "wsproto", APPLICATION],
    "hypercorn": ["hypercorn", f"{APPLICATION}()"],
}
BYTES = "application/octet-stream"
IDS = [1, 6, 0]


@pytest.fixture(scope="module", params=SERVERS)
def address(request: pytest.FixtureRequest, tiny_repository: Path) -> Iterator[str]:
    """The host and port of the application on another server."""
    host = f"127.0.0.1:{free_port()}"
    bind = ["--bind", host] if request.param == "hypercorn" else ["--port", host.partition(":")[2]]
    command = [sys.executable, "-m", *SERVERS[request.param], *bind]
    environment = os.environ | {"PREBLOCK_REPOSITORY": str(tiny_repository)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://{host}/readyz").status_code == 200:
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield host
        finally:
            process.terminate()
            _, logged = process.communicate(timeout=30)
        assert "Traceback" not in logged, logged


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
        yield client


@pytest.fixture
def expected(tables: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    return tables["tokens"][IDS] + tables["positions"][:3]


GETS = (
    *("/livez", "/readyz", "/metrics", "/docs", "/openapi.json", "/models", "/models/gpt", "/models/gpt/versions/1"),
    *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/gpt", "/v2/models/gpt/ready", "/v2/models/gpt/stats"),
    *("/v2/models/gpt/versions/1", "/v1/models"),
)


@pytest.mark.parametrize("path", GETS)
def test_get_is_answered(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


def test_embed_has_the_right_bits(http: httpx.Client, expected: NDArray[np.float32]) -> None:
    for _ in range(3):
        body = np.array([IDS]).tobytes()
        answer = http.post(
            "/models/gpt/embed?shape=1,3", content=body, headers={"Content-Type": BYTES, "Accept": BYTES}
        )
        assert answer.content == expected.tobytes()
        assert answer.headers["X-Request-Id"]
    document = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": IDS}]}
    found = http.post("/v2/models/gpt/infer", json=document).json()["outputs"][0]["data"]
    np.testing.assert_array_equal(np.array(found, np.float32), expected.reshape(-1))
    answer = http.post("/v1/embeddings", json={"model": "gpt", "input": IDS})
    assert answer.status_code == 200
    assert http.post("/models/gpt/embed", json={"input_ids": [-1]}).status_code == 422


def test_large_answer_is_streamed(http: httpx.Client, expected: NDArray[np.float32]) -> None:
    rows = 20_000
    headers = {"Accept": BYTES}
    with http.stream("POST", "/models/gpt/embed", json={"input_ids": [IDS] * rows}, headers=headers) as answer:
        assert answer.read() == expected.tobytes() * rows


def test_web_socket_answers_frames_and_texts(address: str, expected: NDArray[np.float32]) -> None:
    with connect(f"ws://{address}/models/gpt/decode") as stream:
        for position, number in enumerate(IDS[:2]):
            stream.send(step_frame([number]))
            frame = stream.recv()
            assert isinstance(frame, bytes)
            assert frame[5] == VECTORS
            assert frame[FRAME.size + 12 :] == expected[position].tobytes()
        stream.send('{"input_ids": [0]}')
        assert json.loads(stream.recv())["next_offset"] == [3]
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{address}/models/none/decode")
    assert refused.value.response.status_code == 404


def test_lines_of_steps_are_answered(http: httpx.Client) -> None:
    lines = b"".join(orjson.dumps({"input_ids": [number]}) + b"\n" for number in IDS)
    answer = http.post("/models/gpt/decode", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert [orjson.loads(line)["next_offset"] for line in answer.text.splitlines()] == [[1], [2], [3]]


def test_the_test_client_reaches_every_protocol(tiny_repository: Path, expected: NDArray[np.float32]) -> None:
    with TestClient(create_app(Settings(repository=tiny_repository))) as client:
        for path in GETS:
            assert client.get(path).status_code == 200
        body = np.array([IDS]).tobytes()
        headers = {"Content-Type": BYTES, "Accept": BYTES}
        assert client.post("/models/gpt/embed?shape=1,3", content=body, headers=headers).content == expected.tobytes()
        with client.websocket_connect("/models/gpt/decode") as stream:
            stream.send_bytes(step_frame(IDS[:1]))
            assert stream.receive_bytes()[FRAME.size + 12 :] == expected[0].tobytes()
            stream.send_text('{"input_ids": [6]}')
            assert json.loads(stream.receive_text())["next_offset"] == [2]
