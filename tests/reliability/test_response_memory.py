"""Large responses to many clients that do not read: the memory meanwhile and afterwards. Measured by proc(5)."""

import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import coverage
import httpx
import numpy as np
import pytest
import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection

from tests.reliability.wires import UPGRADE, frame
from tests.support.artifacts import make_repository
from tests.support.connections import dial, http_request
from tests.support.open_inference import infer_message
from tests.support.processes import status_bytes
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

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


def openai(encoding: str) -> bytes:
    fields = {"model": "gpt2-small", "input": ROWS, "encoding_format": encoding, "pooling": "mean"}
    return http_request("/v1/embeddings", json.dumps(fields).encode(), JSON)


PROMPTS: dict[str, object] = {"input_ids": [[1] * 1024] * 4, "encoding": "prompt_embeds", "output": "token_embeddings"}
POOLED: dict[str, object] = {"input_ids": ROWS, "pooling": "mean", "encoding": "float"}
REQUESTS = {
    "pooled": (60, embed("gpt2-small", POOLED)),
    "pooled gzip": (60, embed("gpt2-small", POOLED, **{"Accept-Encoding": "gzip"})),
    "pooled 1.0": (60, embed("gpt2-small", POOLED).replace(b"HTTP/1.1", b"HTTP/1.0", 1)),
    "tokens": (60, embed("transformer-base", {"input_ids": [[1] * 4096], "encoding": "float"})),
    "prompt_embeds": (60, embed("gpt2-small", PROMPTS)),
    "openai float": (60, openai("float")),
    "openai base64": (60, openai("base64")),
    "events": (
        60,
        http_request(
            "/models/transformer-base/decode",
            b'{"input_ids": [[1%s]], "encoding": "float", "chunk": 4096}' % (b",1" * 4095),
            JSON | {"Accept": "text/event-stream"},
        ),
    ),
    "socket": (
        60,
        UPGRADE.replace(b"/gpt/decode", b"/transformer-base/decode?encoding=float")
        + frame(1, b'{"input_ids": [[1%s]]}' % (b",1" * 4095)),
    ),
    "positions": (120, http_request("/models/transformer-base/positions?count=4096", method="GET")),
}
BIAS = http_request("/models/t5/bias", b'{"query_length": 2000, "key_length": 2000}', JSON)
"""Number of connections, and the request of each."""


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


def leave_unread(server: Server, count: int, request: bytes, slowness: int = 1) -> None:
    before = status_bytes(server.pid, "VmRSS")
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(dial(server.address)).sendall(request)
        check_memory(server, stack, before, slowness=slowness)


@pytest.mark.parametrize("name", REQUESTS)
def test_unread_large_responses_have_bounded_memory(response_server: Server, name: str) -> None:
    leave_unread(response_server, *REQUESTS[name], slowness=2 if name == "socket" else 1)  # 60 handshakes too


@pytest.mark.parametrize("name", ["tokens", "socket"])
def test_unread_responses_over_tls_have_bounded_memory(model_repository: Path, tmp_path: Path, name: str) -> None:
    """The TLS of the event loop accepts any bytes, and reports no waiting ones."""
    authority, context, file = trustme.CA(), ssl.create_default_context(), str(tmp_path / "both.pem")
    options = "--tls-cert-file", file, "--tls-key", file
    authority.configure_trust(context)
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    count, request = REQUESTS[name]
    with (
        serve_warm(model_repository, *options, tls=context) as server,
        ExitStack() as stack,
    ):
        before = status_bytes(server.pid, "VmRSS")
        for _ in range(count):
            plain = stack.enter_context(dial(server.address))
            stream = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
            stream.sendall(request)
        check_memory(server, stack, before, context)


def test_unread_biases_have_bounded_memory(tmp_path: Path) -> None:
    with serve_warm(make_repository(tmp_path, t5="t5")) as server:
        leave_unread(server, 60, BIAS)


def call(address: str, method: str, message: bytes) -> socket.socket:
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
            stack.enter_context(call(response_server.grpc, method, message))
        check_memory(response_server, stack, before)
