"""Answers over HTTP/1.1: their order, their segments, their streaming, and the end of a connection.

Oracles: the answers of the JSON protocol, and the counters.
"""

import base64
import gzip
import http.client
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, cast

import httpx
import numpy as np
import orjson
import pytest
import uvicorn
from numpy.typing import NDArray

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.engine.chunking import MAX_BUFFERED_TEXT_VALUES
from preblock.service.server.front import Front
from preblock.service.server.run import configure
from tests.service.api.http.test_response import tokens_of
from tests.support.artifacts import make_repository
from tests.support.connections import RawConnection, dial, http_request
from tests.support.open_inference import binary_infer
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

NPY, BYTES = "application/x-npy", "application/octet-stream"
VOCABULARY, WIDTH, MAX_LEN = 500, 96, 900
Ids = NDArray[np.int64]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of large answers to the longest requests."""
    return make_repository(tmp_path_factory.mktemp("connections"), gpt="gpt-500x96x900")


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Server]:
    with serve(root) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.address, timeout=30) as client:
        yield client


def raw(ids: Ids, offset: int) -> tuple[str, bytes, dict[str, str]]:
    path = f"/models/gpt/versions/1/embed?offset={offset}&shape={ids.shape[0]},{ids.shape[1]}"
    return path, ids.tobytes(), {"Content-Type": BYTES, "Accept": BYTES}


def v2(ids: Ids, offset: int) -> tuple[str, bytes, dict[str, str]]:
    outputs = [{"name": "embeddings", "parameters": {"binary_data": True}}]
    headers, body = binary_infer({"input_ids": ids, "offset": np.array([offset])}, outputs=outputs)
    return "/v2/models/gpt/infer", body, headers


def oracle(client: httpx.Client, ids: Ids, offset: int) -> NDArray[np.float32]:
    document = client.post("/models/gpt/embed", json={"input_ids": ids.tolist(), "offset": offset}).json()
    return np.frombuffer(base64.b64decode(document["embeddings"]), np.float32).reshape(*ids.shape, WIDTH)


@pytest.mark.parametrize("write", [raw, v2])
def test_repeated_request_has_same_headers_and_statistics(
    client: httpx.Client, write: Callable[[Ids, int], tuple[str, bytes, dict[str, str]]]
) -> None:
    path, body, headers = write(np.array([[3, 4]]), 5)
    first = client.post(path, content=body, headers=headers)
    before, stats = tokens_of(client, "gpt"), client.get("/v2/models/gpt/stats").json()["model_stats"][0]
    second = client.post(path, content=body, headers=headers)
    assert second.content == first.content
    names = set(first.headers) - {"date", "x-request-id", "server-timing"}
    assert {name: second.headers[name] for name in names} == {name: first.headers[name] for name in names}
    assert set(second.headers) == set(first.headers)
    assert tokens_of(client, "gpt") == before + 2
    after = client.get("/v2/models/gpt/stats").json()["model_stats"][0]
    assert after["inference_count"] == stats["inference_count"] + 1
    assert after["inference_stats"]["success"]["count"] == stats["inference_stats"]["success"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > stats["inference_stats"]["compute_infer"]["ns"]


@pytest.mark.parametrize("split", [0, 1, 7])
def test_pipelined_requests_are_answered_in_order(running: Server, split: int) -> None:
    sizes = [(1, 1), (1, 1), (2, 300), (9, 850), (1, 1), (1, 40), (1, 40), (9, 850), (1, 1)]
    sent, expected = b"", []
    with httpx.Client(base_url=running.address) as client:
        for number, shape in enumerate(sizes):
            ids = np.full(shape, number)
            path, body, headers = raw(ids, number)
            expected.append(client.post(path, content=body, headers=headers).content)
            sent += http_request(path, body, headers)
            sent += b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
            expected.append(client.get("/livez").content)
    size = len(sent) // (split or 1) + 1
    with RawConnection(running.address) as stream:
        stream.send(*(sent[begin : begin + size] for begin in range(0, len(sent), size)))
        assert [stream.answer()[2] for _ in expected] == expected


def test_connection_is_closed_on_request(running: Server) -> None:
    url = httpx.URL(running.address)
    path, body, headers = raw(np.array([[1]]), 0)
    for _ in range(3):
        with dial(url) as stream:
            stream.sendall(http_request(path, body, headers | {"Connection": "close"}))
            answer = b"".join(iter(lambda: stream.recv(65536), b""))
            assert b"connection: close\r\n" in answer
            assert len(answer.partition(b"\r\n\r\n")[2]) == 4 * WIDTH
    with closing(http.client.HTTPConnection(url.host, url.port)) as connection:
        for _ in range(3):
            connection.request("POST", path, body, headers)
            assert len(connection.getresponse().read()) == 4 * WIDTH


SMALL_PARTS = orjson.dumps({"input_ids": [[1]] * 40_000, "encoding": "prompt_embeds", "dtype": "float16"})
"""A request for an archive for each row, each smaller than one write."""


@pytest.mark.parametrize(
    ("request_", "known"),
    [
        (raw(np.ones((70, 850), np.int64), 0), False),
        (raw(np.ones((70, 850), np.int64), 0), True),
        (("/models/gpt/embed", SMALL_PARTS, {"Content-Type": "application/json"}), False),
    ],
)
def test_disconnect_stops_the_computation(
    running: Server, client: httpx.Client, request_: tuple[str, bytes, dict[str, str]], known: bool
) -> None:
    path, body, headers = request_
    sent = http_request(path, body, headers | ({} if known else {"X-Another": "form"}))

    def counts() -> tuple[int, int]:
        (model,) = client.get("/v2/models/gpt/stats").json()["model_stats"]
        return tuple(model["inference_stats"][kind]["count"] for kind in ("success", "fail"))

    if known:
        with RawConnection(running.address) as connection:
            assert len(connection.ask(sent)[2]) == 70 * 850 * WIDTH * 4
    success, fail = counts()
    with dial(running.address) as stream:
        stream.sendall(sent)
        assert stream.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: counts() != (success, fail))
    assert counts() == (success, fail + 1)


def test_unread_large_response_counts_as_running_request(root: Path) -> None:
    """The first of its form, one like it, one of FastAPI's, and numbers, as they are and compressed."""
    path, body, headers = raw(np.zeros((35, 850), np.int64), 0)
    address, document, _ = LARGE["native"]
    numbers = address, orjson.dumps(document(np.zeros((16, 850), np.int64))), {"Content-Type": "application/json"}
    with (
        serve(root, PREBLOCK_MAX_CONCURRENT_REQUESTS="1") as server,
        httpx.Client(base_url=server.address, timeout=30) as client,
    ):
        url = httpx.URL(server.address)

        def status() -> int:
            return client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code

        for way, whole in (
            ((path, body, headers), True),
            ((path, body, headers), False),
            ((path, body, headers | {"Origin": server.address}), False),
            (numbers, False),
            ((*numbers[:2], numbers[2] | {"Accept-Encoding": "gzip"}), False),
        ):
            with socket.socket() as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stream.connect((url.host, url.port))
                stream.sendall(http_request(*way))
                assert stream.recv(12) == b"HTTP/1.1 200"
                assert status() == 503
                if whole:
                    left = 35 * 850 * WIDTH * 4
                    while left > 0:
                        left -= len(stream.recv(2**16))
            wait_until(lambda: status() == 200)


def test_small_requests_of_many_connections_share_runs(running: Server, client: httpx.Client) -> None:
    path, body, headers = raw(np.array([[5]]), 3)
    expected = client.post(path, content=body, headers=headers).content

    def counts() -> tuple[int, int]:
        (stats,) = client.get("/v2/models/gpt/stats").json()["model_stats"]
        return stats["inference_count"], stats["execution_count"]

    requests, runs = counts()
    with ExitStack() as stack:
        streams = [stack.enter_context(RawConnection(running.address)) for _ in range(20)]
        for sent in range(20, 20 * 100, 20):  # on a busy machine requests may arrive one by one
            for stream in streams:
                stream.send(http_request(path, body, headers))
            for stream in streams:
                assert stream.answer()[2] == expected
            assert counts()[0] - requests == sent
            if counts()[1] - runs < sent:
                return
    pytest.fail("each request had a run of its own")


def test_large_compressed_response_is_chunked_and_keeps_alive(running: Server, client: httpx.Client) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (16, 400))
    path, body, headers = raw(ids, 0)
    url = httpx.URL(running.address)
    with closing(http.client.HTTPConnection(url.host, url.port)) as connection:
        for _ in range(2):  # the second by the same open connection
            connection.request("POST", path, body, headers | {"Accept-Encoding": "gzip"})
            answer = connection.getresponse()
            assert answer.headers["Transfer-Encoding"] == "chunked"
            content = gzip.decompress(answer.read())
            assert not answer.will_close
            assert content[-4 * ids.size * WIDTH :] == oracle(client, ids, 0).tobytes()


def test_http_1_0_client_gets_no_chunks(running: Server, client: httpx.Client) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (25, 900))
    path, document, values = LARGE["native"]
    body = orjson.dumps(document(ids))
    request = http_request(path, body, {"Content-Type": "application/json"})
    with dial(running.address) as stream:
        stream.sendall(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        answered = b"".join(iter(lambda: stream.recv(2**16), b""))
    told, _, content = answered.partition(b"\r\n\r\n")
    assert b"chunked" not in told.lower()
    assert b"content-length: %d" % len(content) in told.lower()
    np.testing.assert_array_equal(np.array(values(orjson.loads(content)), np.float32), oracle(client, ids, 0))


LARGE: dict[str, tuple[str, Callable[[Ids], dict[str, Any]], Callable[[Any], Any]]] = {
    "native": (
        "/models/gpt/embed",
        lambda ids: {"input_ids": ids.tolist(), "encoding": "float"},
        lambda document: document["embeddings"],
    ),
    "open-inference": (
        "/v2/models/gpt/infer",
        lambda ids: {
            "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": ids.shape, "data": ids.reshape(-1).tolist()}]
        },
        lambda document: document["outputs"][0]["data"],
    ),
}


@pytest.mark.parametrize(
    ("protocol", "shape", "coding"),
    [
        ("native", (25, 900), "gzip"),
        ("native", (3200, 7), "identity"),
        ("open-inference", (25, 900), "identity"),
        ("open-inference", (3200, 7), "gzip"),
    ],
)
def test_large_json_response_is_streamed(
    client: httpx.Client, protocol: str, shape: tuple[int, int], coding: str
) -> None:
    path, document, values = LARGE[protocol]
    ids = np.random.default_rng(0).integers(0, VOCABULARY, shape)
    answer = client.post(path, json=document(ids), headers={"Accept-Encoding": coding})
    assert ids.size * WIDTH > MAX_BUFFERED_TEXT_VALUES
    assert answer.headers["Transfer-Encoding"] == "chunked"
    found = np.array(values(orjson.loads(answer.content)), np.float32)
    assert found.shape == ((*shape, WIDTH) if protocol == "native" else (ids.size * WIDTH,))
    np.testing.assert_array_equal(found.reshape(*shape, WIDTH), oracle(client, ids, 0))


def test_large_ragged_json_response_is_streamed(client: httpx.Client) -> None:
    lengths = [3, 800, 1, 900, 5, 899, 850, 800, 890, 899, 700] * 4
    ids = np.random.default_rng(0).integers(0, VOCABULARY, sum(lengths))
    rows = [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
    answer = client.post("/models/gpt/embed", json={"input_ids": rows, "encoding": "float"})
    assert answer.headers["Transfer-Encoding"] == "chunked"
    found = np.array(orjson.loads(answer.content)["embeddings"], np.float32)
    expected = client.post("/models/gpt/embed", json={"input_ids": rows}).json()["embeddings"]
    assert found.tobytes() == base64.b64decode(expected)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_other_method_uses_no_template(client: httpx.Client, method: str) -> None:
    path, body, headers = raw(np.array([[1, 2]]), 0)
    alone = client.request(method, path, content=body, headers=headers | {"X-Other": method})
    for _ in range(2):
        assert client.post(path, content=body, headers=headers).status_code == 200
    assert client.request(method, path, content=body, headers=headers).status_code == alone.status_code == 405


def chunks_of(answer: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks of an answer (RFC 9112, section 7.1)."""
    while answer.readline() != b"\r\n":
        pass
    while size := int(answer.readline(), 16):
        yield answer.read(size)
        answer.readline()
    answer.readline()


def test_disconnect_after_last_chunk_is_not_logged(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, body, headers = raw(np.random.default_rng(0).integers(0, VOCABULARY, (4, 775)), 0)
    request = http_request(path, body, headers | {"Accept-Encoding": "gzip"})
    settings = Settings(repository=root)
    server = uvicorn.Server(configure(settings, create_app(settings)))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as stream:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as there may be
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        stream.settimeout(30)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        stream.connect(listener.getsockname())
        with stream.makefile("rb", buffering=1) as answer:  # reads no further than requested
            stream.sendall(request)
            sizes = [len(chunk) for chunk in chunks_of(answer)]
            connection = cast(Front, next(iter(server.server_state.connections)))
            transport = connection.transport
            connection.loop.call_soon_threadsafe(transport.set_write_buffer_limits, 0)
            stream.sendall(request)
            assert [len(chunk) for chunk in islice(chunks_of(answer), len(sizes) - 1)] == sizes[:-1]
            wait_until(lambda: 0 < transport.get_write_buffer_size() < sizes[-1])  # no socket holds the last chunk
        stream.close()
        wait_until(lambda: not (server.server_state.connections or connection.tasks))
        server.should_exit = True
        thread.join()
    assert "ERROR" not in capfd.readouterr().err
