"""Large bodies and responses of many clients: the memory of all together, and afterwards. Measured by proc(5)."""

import gzip
import json
import os
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import coverage
import grpc
import httpx
import numpy as np
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect

from preblock.service.core.large_bodies import MAX_LARGEST_BODIES
from tests.reliability.load import asking_meanwhile
from tests.reliability.wires import UPGRADE, frame, web_socket
from tests.support.artifacts import make_repository
from tests.support.connections import dial, http_request
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, infer_message, open_stub
from tests.support.processes import status_bytes
from tests.support.servers import Server, serve
from tests.support.tls import TlsFiles
from tests.support.waiting import wait_until

LARGEST_BODY, CLIENTS = 2**22, 60
QUEUE_SECONDS = 2
MAX_GROWTH_BYTES = 100 * 2**20
"""After floods, and for begun bodies: 16 MiB of the bound, 4 of the oldest, and 256 kB and some buffers of each client.

All clients would send 240 MiB.
"""
PART = LARGEST_BODY - 1000
EMBED, DECODE = "/models/gpt/embed", "/models/gpt/decode"
CHUNKED = {"Transfer-Encoding": "chunked"}
LINES = {"Content-Type": "application/x-ndjson", **CHUNKED}
CHUNK, FRAME = b"%x\r\n" % LARGEST_BODY, b"\x81\xff" + struct.pack(">Q", LARGEST_BODY) + bytes(4)
BEGUN = {
    "length": http_request(EMBED, bytes(LARGEST_BODY))[:-LARGEST_BODY] + bytes(PART),
    "chunks": http_request(EMBED, CHUNK + b" " * PART, CHUNKED),
    "line": http_request(DECODE, CHUNK + b" " * PART, LINES),
    "frame": UPGRADE + FRAME + b" " * PART,
    "fragments": UPGRADE
    + (b"\x01\xfe\xff\xff" + bytes(4) + b" " * 65535)
    + (b"\x00\xfe\xff\xff" + bytes(4) + b" " * 65535) * (PART // 65535 - 1),
}
"""Bytes of each client: nearly a whole body or message."""
WHOLE = b'{"input_ids": [[1, 2]]}'


@pytest.fixture(scope="module", params=BEGUN)
def begun(request: pytest.FixtureRequest, tiny_repository: Path) -> Iterator[tuple[Server, bytes]]:
    """Serve with memory of its own for each kind of request."""
    options = "--max-body-bytes", str(LARGEST_BODY), "--queue-timeout-seconds", str(QUEUE_SECONDS)
    with serve(tiny_repository, *options) as server:
        yield server, BEGUN[request.param]


def send_all(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the server reads no more, or has refused it
        stream.sendall(data)


def test_incomplete_large_bodies_share_a_bound(begun: tuple[Server, bytes]) -> None:
    server, data = begun
    with httpx.Client(base_url=server.address, timeout=60) as http, ExitStack() as stack:
        assert http.post(EMBED, content=WHOLE).status_code == 200
        before = status_bytes(server.pid, "VmRSS")
        streams = [stack.enter_context(dial(server.address, timeout=10)) for _ in range(CLIENTS)]
        threads = [Thread(target=send_all, args=(stream, data)) for stream in streams]
        for thread in threads:
            thread.start()
        statuses = [http.post(EMBED, content=WHOLE).status_code for _ in range(20)]
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert status_bytes(server.pid, "VmHWM") < before + MAX_GROWTH_BYTES
        wait_until(lambda: http.post(EMBED, content=WHOLE.ljust(LARGEST_BODY)).status_code == 200)


LIMIT = 16 * 2**20
FLOOD_CONNECTIONS = 8
FLOOD_REQUESTS = 20
MAX_FLOOD_BYTES = 2 * 2**30
BUSY = 503, grpc.StatusCode.UNAVAILABLE
Send = Callable[[Server, httpx.Client], object]


def numbers(size: int) -> bytes:
    """Return a JSON body of `size` bytes."""
    body = b'{"input_ids": [' + b"1," * ((size - 20) // 2) + b"1]}"
    return body.ljust(size)


def post(body: bytes, coding: str = "identity") -> Send:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return lambda _, http: http.post("/models/gpt/embed", content=body, headers=headers).status_code


def call(message: service_pb2.ModelInferRequest, compression: grpc.Compression | None = None) -> Send:
    def send(server: Server, _: httpx.Client) -> object:
        with open_stub(server.grpc, OWN_CONNECTION, NO_LIMIT) as stub, pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(message, compression=compression, wait_for_ready=True)
        return error.value.code()

    return send


def raw_message() -> service_pb2.ModelInferRequest:
    return infer_message(np.ones((1, LIMIT // 8 - 16)))


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


EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FLOODS: dict[str, Callable[[], tuple[Send, object]]] = {
    "gzip to the limit": lambda: (post(gzip.compress(numbers(LIMIT), 1), "gzip"), 413),
    "gzip beyond the limit": lambda: (post(gzip.compress(numbers(4 * LIMIT), 1), "gzip"), 413),
    "json": lambda: (post(numbers(LIMIT)), 413),
    "grpc raw": lambda: (call(raw_message()), EXHAUSTED),
    "grpc typed": lambda: (call(typed_message()), EXHAUSTED),
    "grpc gzip": lambda: (call(raw_message(), grpc.Compression.Gzip), EXHAUSTED),
    "websocket": lambda: (send_message, 413),
}


def flood(server: Server, send: Send, requests: int) -> Counter[object]:
    """Send requests over FLOOD_CONNECTIONS connections, and return the number of each status."""
    with (
        httpx.Client(
            base_url=server.address, timeout=120, limits=httpx.Limits(max_connections=FLOOD_CONNECTIONS)
        ) as http,
        ThreadPoolExecutor(FLOOD_CONNECTIONS) as pool,
    ):
        return Counter(pool.map(lambda _: send(server, http), range(requests)))


@pytest.fixture(scope="module")
def memory_server(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository) as running:
        yield running


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_large_bodies_leaves_no_memory_in_use(memory_server: Server, name: str, good_answer: bytes) -> None:
    send, status = FLOODS[name]()
    pid = memory_server.pid
    flood(memory_server, send, 4)
    before = status_bytes(pid, "VmRSS")
    with asking_meanwhile(memory_server, good_answer):
        statuses = flood(memory_server, send, FLOOD_REQUESTS)
    assert statuses[status]
    assert statuses.keys() <= {status, *BUSY}
    wait_until(lambda: status_bytes(pid, "VmRSS") < before + MAX_GROWTH_BYTES, seconds=10)
    assert status_bytes(pid, "VmHWM") < MAX_FLOOD_BYTES


CUT = {
    "http": http_request("/models/gpt/embed", bytes(LIMIT))[:-LIMIT],
    "websocket": b"\x81\xff" + LIMIT.to_bytes(8) + b"mask",
}
"""Heads of a body, and of a message."""
CUT_BYTES = 50 * 2**20
"""Less than the memory for incomplete bodies."""


@pytest.mark.parametrize("kind", CUT)
def test_disconnects_within_body_leave_no_memory_in_use(tiny_repository: Path, kind: str) -> None:
    with serve(tiny_repository) as server, ExitStack() as stack:
        before = status_bytes(server.pid, "VmRSS")
        for _ in range(FLOOD_CONNECTIONS):
            connection = stack.enter_context(dial(server.address) if kind == "http" else web_socket(server))
            connection.settimeout(1)
            with suppress(TimeoutError):  # the memory for incomplete bodies is full
                connection.sendall(CUT[kind] + b"1" * (LIMIT - 2**16))
            stack.callback(connection.shutdown, socket.SHUT_RDWR)
        wait_until(lambda: status_bytes(server.pid, "VmRSS") > before + CUT_BYTES, seconds=10)
        stack.close()
        wait_until(lambda: status_bytes(server.pid, "VmRSS") < before + CUT_BYTES, seconds=10)


MIB = 2**20
MAX_PEAK_BYTES, MAX_LEFT_BYTES = 400 * MIB, 100 * MIB
MAX_LIVE_SECONDS = 0.5 if coverage.Coverage.current() is None else 1.5
"""For a small request behind 60 large ones. The measurement of coverage slows each Python line of the server."""
MAX_RETURN_SECONDS = 10
HELD_SECONDS = 4
JSON = {"Content-Type": "application/json"}
ROWS = [[1]] * 16_000


def embed(model: str, fields: dict[str, object], **headers: str) -> bytes:
    return http_request(f"/models/{model}/embed", json.dumps(fields).encode(), JSON | headers)


OPENAI = {"model": "gpt2-small", "input": ROWS, "encoding_format": "float", "pooling": "mean"}
PROMPTS: dict[str, object] = {"input_ids": [[1] * 1024] * 4, "encoding": "prompt_embeds", "output": "token_embeddings"}
POOLED: dict[str, object] = {"input_ids": ROWS, "pooling": "mean", "encoding": "float"}
LONGEST = b'{"input_ids": [[1%s]]}' % (b",1" * 4095)
EVENTS = JSON | {"Accept": "text/event-stream"}
REQUESTS = {
    "pooled": embed("gpt2-small", POOLED),
    "pooled gzip": embed("gpt2-small", POOLED, **{"Accept-Encoding": "gzip"}),
    "pooled 1.0": embed("gpt2-small", POOLED).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "tokens": embed("transformer-base", {"input_ids": [[1] * 4096], "encoding": "float"}),
    "prompt_embeds": embed("gpt2-small", PROMPTS),
    "openai": http_request("/v1/embeddings", json.dumps(OPENAI).encode(), JSON),
    "events": http_request("/models/transformer-base/decode?encoding=float&chunk=4096", LONGEST, EVENTS),
    "socket": UPGRADE.replace(b"/gpt/decode", b"/transformer-base/decode?encoding=float") + frame(1, LONGEST),
    "positions": http_request("/models/transformer-base/positions?count=4096", method="GET"),
}
"""A request with a large response, on each of CONNECTIONS."""
CONNECTIONS = 60
BIAS = http_request("/models/t5/bias", b'{"query_length": 2000, "key_length": 2000}', JSON)


@contextmanager
def serve_warm(repository: Path, *options: str, tls: ssl.SSLContext | bool = True) -> Iterator[Server]:
    """Serve after a first request, whose memory stays."""
    with (
        serve(repository, "--log-level", "warning", *options) as running,
        httpx.Client(base_url=running.address, verify=tls) as http,
    ):
        assert http.get("/readyz").status_code == 200
        yield running


@pytest.fixture
def response_server(model_repository: Path) -> Iterator[Server]:
    """Serve with memory of its own, in place of the server of all tests."""
    with serve_warm(model_repository) as running:
        yield running


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_memory(
    server: Server, stack: ExitStack, before: int, tls: ssl.SSLContext | bool = True, slowness: int = 1
) -> None:
    """Check memory and liveness while clients do not read, and after they have left."""
    pid, end = server.pid, time.monotonic() + HELD_SECONDS
    slowest = 0.0
    with httpx.Client(base_url=server.address, timeout=30, verify=tls) as http:
        while time.monotonic() < end:
            began, worked = time.perf_counter(), cpu_seconds(pid)
            assert http.get("/livez").status_code == 200
            # On a busy machine, the time of other processes does not count.
            slowest = max(slowest, min(time.perf_counter() - began, cpu_seconds(pid) - worked))
            time.sleep(0.02)
    assert status_bytes(pid, "VmHWM") < before + MAX_PEAK_BYTES
    assert slowest < slowness * MAX_LIVE_SECONDS
    stack.close()
    wait_until(lambda: status_bytes(pid, "VmRSS") < before + MAX_LEFT_BYTES, seconds=MAX_RETURN_SECONDS)


def leave_unread(server: Server, request: bytes, slowness: int = 1) -> None:
    before = status_bytes(server.pid, "VmRSS")
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(dial(server.address)).sendall(request)
        check_memory(server, stack, before, slowness=slowness)


@pytest.mark.parametrize("name", REQUESTS)
def test_unread_large_responses_have_bounded_memory(response_server: Server, name: str) -> None:
    leave_unread(response_server, REQUESTS[name], slowness=2 if name == "socket" else 1)  # 60 handshakes too


@pytest.mark.parametrize("name", ["tokens", "socket"])
def test_unread_responses_over_tls_have_bounded_memory(model_repository: Path, tmp_path: Path, name: str) -> None:
    """The TLS of the event loop accepts any bytes, and reports no waiting ones."""
    tls = TlsFiles(tmp_path)
    context = tls.context()
    with serve_warm(model_repository, *tls.options, tls=context) as server, ExitStack() as stack:
        before = status_bytes(server.pid, "VmRSS")
        for _ in range(CONNECTIONS):
            stack.enter_context(tls.connect(server.address, context)).sendall(REQUESTS[name])
        check_memory(server, stack, before, context)


def test_unread_biases_have_bounded_memory(tmp_path: Path) -> None:
    with serve_warm(make_repository(tmp_path, t5="t5")) as server:
        leave_unread(server, BIAS)


def open_call(address: str, method: str, message: bytes) -> socket.socket:
    """Send a call of gRPC, and read no response: no window of it is opened."""
    stream = dial(f"http://{address}")
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":path": f"/inference.GRPCInferenceService/{method}"}
    headers |= {":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    client.send_headers(1, [*headers.items()])
    rest = b"\0" + len(message).to_bytes(4) + message
    while rest:
        size = min(len(rest), client.local_flow_control_window(1), client.max_outbound_frame_size)
        client.send_data(1, rest[:size], end_stream=size == len(rest) and method == "ModelInfer")
        rest = rest[size:]
        stream.sendall(client.data_to_send())
        while rest and not client.local_flow_control_window(1):
            received = stream.recv(2**16)
            assert received
            client.receive_data(received)
    return stream


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_unread_messages_of_grpc_have_bounded_memory(response_server: Server, method: str) -> None:
    message = infer_message(np.ones((10, 1024), np.int64), model="gpt2-small").SerializeToString()
    before = status_bytes(response_server.pid, "VmRSS")
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(open_call(response_server.grpc, method, message))
        check_memory(response_server, stack, before)


LARGEST_RESPONSE, TOKENS = 2**23, 2000  # a response has 6 of 8 MiB
STALL_SECONDS = 1
OPTIONS = ("--max-buffered-response-bytes", str(LARGEST_RESPONSE), "--body-timeout-seconds", str(STALL_SECONDS))
FIELDS: dict[str, object] = {"input_ids": [[1]] * TOKENS, "pooling": "mean"}
HTTP = http_request("/models/gpt2-small/embed", json.dumps(FIELDS).encode(), {"Content-Type": "application/json"})
STEP = frame(1, b'{"input_ids": [[1%s]]}' % (b",1" * 4095))
HELD_REQUESTS = {
    "connection": HTTP,
    "application": HTTP.replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "socket": UPGRADE.replace(b"/gpt/", b"/transformer-base/") + STEP,
}
HOLDERS = MAX_LARGEST_BODIES + 1
"""More clients than the memory has largest responses."""


@pytest.fixture(scope="module", params=["tcp", "unix"])
def stalling_server(
    request: pytest.FixtureRequest, model_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    unix = () if request.param == "tcp" else ("--uds", str(tmp_path_factory.mktemp("uds") / "http.sock"))
    with serve(model_repository, *OPTIONS, *unix) as running:
        yield running


def ask(server: Server, request: bytes, stack: ExitStack) -> socket.socket:
    """Send a request on a connection with a small window, and return the connection."""
    url = urlsplit(server.address)
    stream = stack.enter_context(socket.socket(socket.AF_UNIX if "+unix" in url.scheme else socket.AF_INET))
    stream.settimeout(20)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.connect(unquote(url.netloc) if "+unix" in url.scheme else (url.hostname, url.port))
    stream.sendall(request)
    return stream


def received_bytes(stream: socket.socket) -> int:
    """Return the bytes until the response is complete, or the connection ends."""
    size = 0
    while size < 4 * TOKENS * 768 and (part := stream.recv(2**16)):
        size += len(part)
    return size


@pytest.mark.parametrize("name", HELD_REQUESTS)
def test_unread_responses_make_room_for_others(stalling_server: Server, name: str) -> None:
    with ExitStack() as stack:
        for _ in range(HOLDERS):
            ask(stalling_server, HELD_REQUESTS[name], stack)
        time.sleep(0.5)
        assert received_bytes(ask(stalling_server, HTTP, stack)) >= 4 * TOKENS * 768  # within the timeout of `ask`


def test_unread_response_without_others_stays(stalling_server: Server) -> None:
    with ExitStack() as stack:
        stream = ask(stalling_server, HTTP, stack)
        time.sleep(4 * STALL_SECONDS)
        assert received_bytes(stream) >= 4 * TOKENS * 768
