"""Floods of the largest bodies: the memory afterwards, and other clients meanwhile. Measured by proc(5)."""

import gzip
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from tests.reliability.wires import still_right
from tests.support.artifacts import copy_artifact
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, infer_message, open_stub
from tests.support.processes import status_bytes
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

LIMIT = 16 * 2**20
CONNECTIONS = 8
REQUESTS = 20
MAX_GROWTH_BYTES = 100 * 2**20
MAX_PEAK_BYTES = 2 * 2**30
JSON = {"Content-Type": "application/json"}
GZIP = {"Content-Encoding": "gzip"}
BUSY = 503, grpc.StatusCode.UNAVAILABLE
Send = Callable[[Server, httpx.Client], object]


def numbers(size: int) -> bytes:
    """Return a JSON body of `size` bytes."""
    body = b'{"input_ids": [' + b"1," * ((size - 20) // 2) + b"1]}"
    return body.ljust(size)


def post(body: bytes, **headers: str) -> Send:
    def send(_: Server, http: httpx.Client) -> int:
        return http.post("/models/gpt/embed", content=body, headers=JSON | headers).status_code

    return send


def call(message: service_pb2.ModelInferRequest, compression: grpc.Compression | None = None) -> Send:
    def send(server: Server, _: httpx.Client) -> object:
        with open_stub(server.grpc, OWN_CONNECTION, NO_LIMIT) as stub, pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(message, compression=compression, wait_for_ready=True)
        return error.value.code()

    return send


def typed_message() -> service_pb2.ModelInferRequest:
    """Return a message of numbers: each takes one byte in the message, and many in memory."""
    message = service_pb2.ModelInferRequest(model_name="gpt")
    tensor = message.inputs.add(name="input_ids", datatype="INT64", shape=[1, LIMIT // 4])
    tensor.contents.int64_contents.extend([1] * (LIMIT // 4))
    return message


def send_message(server: Server, _: httpx.Client) -> int:
    """Send a message of the limit to a decode stream, and return the status of its error."""
    with connect(f"{server.socket}/models/gpt/decode", compression=None) as stream:
        stream.send(numbers(LIMIT).decode())
        status: int = json.loads(stream.recv())["error"]["status"]
        return status


FLOODS: dict[str, Callable[[], tuple[Send, object]]] = {
    "gzip to the limit": lambda: (post(gzip.compress(numbers(LIMIT), 1), **GZIP), 413),
    "gzip beyond the limit": lambda: (post(gzip.compress(numbers(4 * LIMIT), 1), **GZIP), 413),
    "json": lambda: (post(numbers(LIMIT)), 413),
    "grpc raw": lambda: (call(infer_message(np.ones((1, LIMIT // 8 - 16)))), grpc.StatusCode.RESOURCE_EXHAUSTED),
    "grpc typed": lambda: (call(typed_message()), grpc.StatusCode.RESOURCE_EXHAUSTED),
    "grpc gzip": lambda: (
        call(infer_message(np.ones((1, LIMIT // 8 - 16))), grpc.Compression.Gzip),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    "websocket": lambda: (send_message, 413),
}


def flood(server: Server, send: Send, requests: int) -> Counter[object]:
    """Send requests over CONNECTIONS connections, and return the number of each status."""
    with (
        httpx.Client(base_url=server.address, timeout=120, limits=httpx.Limits(max_connections=CONNECTIONS)) as http,
        ThreadPoolExecutor(CONNECTIONS) as pool,
    ):
        return Counter(pool.map(lambda _: send(server, http), range(requests)))


@pytest.fixture(scope="module")
def memory_server(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository) as running:
        yield running


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_large_bodies_leaves_no_memory_in_use(memory_server: Server, name: str, good_answer: bytes) -> None:
    send, status = FLOODS[name]()
    pid, over = memory_server.pid, Event()

    def good() -> int:
        with httpx.Client(base_url=memory_server.address, timeout=60) as http:
            answers = 0
            while not over.is_set():
                still_right(http, good_answer)
                answers += 1
        return answers

    flood(memory_server, send, 4)
    before = status_bytes(pid, "VmRSS")
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(good)
        try:
            statuses = flood(memory_server, send, REQUESTS)
        finally:
            over.set()
        assert answered.result()
    assert statuses[status]
    assert statuses.keys() <= {status, *BUSY}
    wait_until(lambda: status_bytes(pid, "VmRSS") < before + MAX_GROWTH_BYTES, seconds=10)
    assert status_bytes(pid, "VmHWM") < MAX_PEAK_BYTES


CUT = {
    "http": b"POST /models/gpt/embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % LIMIT,
    "websocket": b"\x81\xff" + LIMIT.to_bytes(8) + b"mask",
}
"""Heads of a body, and of a message."""
CUT_BYTES = 50 * 2**20
"""Less than the memory for incomplete bodies."""


@pytest.mark.parametrize("kind", CUT)
def test_disconnects_within_body_leave_no_memory_in_use(tiny_repository: Path, kind: str) -> None:
    with serve(tiny_repository) as server, ExitStack() as stack:
        pid, host = server.pid, server.address.removeprefix("http://").split(":")
        before = status_bytes(pid, "VmRSS")
        for _ in range(CONNECTIONS):
            if kind == "http":
                connection = stack.enter_context(socket.create_connection((host[0], int(host[1]))))
            else:
                connection = stack.enter_context(connect(f"{server.socket}/models/gpt/decode")).socket
            connection.settimeout(1)
            with suppress(TimeoutError):  # the memory for incomplete bodies is full
                connection.sendall(CUT[kind] + b"1" * (LIMIT - 2**16))
            stack.callback(connection.shutdown, socket.SHUT_RDWR)
        wait_until(lambda: status_bytes(pid, "VmRSS") > before + CUT_BYTES, seconds=10)
        stack.close()
        wait_until(lambda: status_bytes(pid, "VmRSS") < before + CUT_BYTES, seconds=10)


def test_bodies_over_memory_limit_get_503_with_retry_after(tiny_repository: Path, good_answer: bytes) -> None:
    body = gzip.compress(numbers(LIMIT), 1)
    with (
        serve(tiny_repository, "--max-queue-size", "3") as server,
        httpx.Client(base_url=server.address, timeout=120) as http,
    ):

        def send(_: int) -> httpx.Response:
            return http.post("/models/gpt/embed", content=body, headers=JSON | GZIP)

        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(send, range(80)))
        assert {answer.status_code for answer in answers} == {413, 503}
        rejected = [answer for answer in answers if answer.status_code == 503]
        assert {answer.headers["Retry-After"] for answer in rejected} == {"1"}
        details = {answer.json()["detail"] for answer in rejected}
        assert "The server is busy with other large request bodies, and 3 more wait. Retry later." in details
        still_right(http, good_answer)


def test_repeated_grpc_response_takes_no_new_pages(tmp_path: Path) -> None:
    copy_artifact("gpt-50x768x700", tmp_path, "gpt")
    message, responses, pages = infer_message(np.ones((8, 128))), 20, 768  # of 4 KiB in a response
    with serve(tmp_path) as server, open_stub(server.grpc, NO_LIMIT) as stub:

        def count_faults() -> int:
            for _ in range(responses):
                stub.ModelInfer(message)
            return int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[7])

        before = count_faults()
        assert count_faults() - before < responses * pages / 10
