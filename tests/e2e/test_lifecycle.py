"""The life of a server: what it follows while it serves, and how it ends. Real servers, real clients, real signals."""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as connect_socket

from preblock.service.core.auth import new_key
from tests.support.artifacts import copy_artifact
from tests.support.connections import dial
from tests.support.paths import PREBLOCK
from tests.support.processes import alive, children, fork_servers
from tests.support.processes import workers as workers_of
from tests.support.servers import Server, read_banner, serve

SECONDS = 30
LARGE, WIDTH = (64, 500), 256
"""Rows and tokens of a request whose answer is of 32 MB: more than waits in any buffer."""
BYTES = "Content-Type: application/octet-stream\r\nAccept: application/octet-stream\r\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with wide vectors, and little else to open."""
    root = tmp_path_factory.mktemp("life")
    copy_artifact("gpt-50x256x600", root, "gpt")
    return root


def large() -> bytes:
    body = np.zeros(LARGE, np.int64).tobytes()
    path = f"/models/gpt/embed?shape={LARGE[0]},{LARGE[1]}"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{BYTES}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_large(stream: socket.socket) -> int:
    """Return how many bytes the body of an answer has."""
    file = stream.makefile("rb")
    assert file.readline().startswith(b"HTTP/1.1 200")
    length = 0
    while (line := file.readline().lower()) != b"\r\n":
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    found = 0
    while found < length and (part := file.read(min(2**20, length - found))):
        found += len(part)
    return found


def connected(server: Server) -> socket.socket:
    url = httpx.URL(server.address)
    stream = dial(url)
    stream.settimeout(SECONDS)
    return stream


@pytest.mark.parametrize("alike", [False, True])
def test_a_large_answer_that_is_being_sent_is_finished(models: Path, alike: bool) -> None:
    with serve(models) as server:
        if alike:
            with connected(server) as stream:
                stream.sendall(large())
                assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
        with connected(server) as stream:
            stream.sendall(large())
            stream.recv(10, socket.MSG_PEEK)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(ConnectionRefusedError):  # nobody new
                connected(server)
            assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("late", [1, 8])
def test_requests_that_are_alike_are_answered_until_the_end(models: Path, late: int) -> None:
    """Their last bytes, or all of their bodies, come when the end has begun."""
    body = np.zeros((1, 1), np.int64).tobytes()
    request = (
        f"POST /models/gpt/embed?shape=1,1 HTTP/1.1\r\nHost: x\r\n{BYTES}Content-Length: 8\r\n\r\n".encode() + body
    )
    with serve(models) as server, connected(server) as stream:
        for _ in range(3):
            stream.sendall(request)
            assert read_large(stream) == 4 * WIDTH
        stream.sendall(request[:-late])
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        stream.sendall(request[-late:])
        assert read_large(stream) == 4 * WIDTH
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_ends_it_now(models: Path, tmp_path: Path, workers: str) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", workers]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = httpx.URL(read_banner(process)[1])
        httpx.get(address.join("/readyz"), timeout=SECONDS)
        family = [*children(process.pid), *workers_of(process.pid)]
        with dial(address) as stream:
            stream.sendall(large())  # whose answer nobody reads
            stream.recv(10, socket.MSG_PEEK)
            process.send_signal(signal.SIGTERM)
            time.sleep(1.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 128 + signal.SIGTERM
    deadline = time.monotonic() + SECONDS
    while any(map(alive, family)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_is_obeyed_before_there_is_a_worker(models: Path, tmp_path: Path) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        deadline = time.monotonic() + SECONDS
        while not (servers := fork_servers(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(servers[0], signal.SIGSTOP)  # it would import for a while
        time.sleep(0.5)
        process.terminate()
        assert process.wait(SECONDS) == 0
        os.kill(servers[0], signal.SIGCONT)
        while alive(servers[0]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_changes_nothing(models: Path, workers: str) -> None:
    with serve(models, "--workers", workers) as server, httpx.Client(base_url=server.address, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        before = workers_of(server.process.pid)
        server.process.send_signal(signal.SIGHUP)
        for child in before:  # as of a terminal that is closed
            os.kill(child, signal.SIGHUP)
        time.sleep(1)
        assert client.get("/readyz").status_code == 200
        assert workers_of(server.process.pid) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_lets_them_finish(models: Path, number: signal.Signals) -> None:
    """As a terminal sends it, or who stops a whole control group."""
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            address = httpx.URL(read_banner(process)[1])
            with dial(address, SECONDS) as stream:
                stream.sendall(large())
                stream.recv(10, socket.MSG_PEEK)
                family = [process.pid, *children(process.pid), *workers_of(process.pid)]
                os.killpg(process.pid, number)
                time.sleep(1.5)
                assert process.poll() is None
                assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
            assert process.wait(SECONDS) == 0
            deadline = time.monotonic() + SECONDS
            while any(map(alive, family)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def guarded(models: Path, folder: Path) -> Iterator[tuple[Server, Path, str]]:
    """A server with two keys, their file, and one of them."""
    file = folder / "keys.toml"
    key, entry = new_key("leaver", (), admin=False)
    file.write_text(new_key("stayer", (), admin=False)[1] + entry)
    with serve(models, "--api-keys-file", str(file)) as server:
        yield server, file, key


def revoke(file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_text(file.read_text().rpartition("[[keys]]")[0])
    new.rename(file)


def test_a_key_that_is_taken_out_closes_its_streams(models: Path, tmp_path: Path) -> None:
    with guarded(models, tmp_path) as (server, file, key):
        headers = {"Authorization": f"Bearer {key}"}
        with connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers) as stream:
            stream.send('{"input_ids": [1]}')
            assert json.loads(stream.recv())["next_offset"] == [1]
            revoke(file)
            assert json.loads(stream.recv(SECONDS)) == {"next_offset": [1], "closing": "key"}
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(SECONDS)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, json.loads(closed.value.rcvd.reason)["closing"]) == (1008, "key")


def test_over_grpc_too(models: Path, tmp_path: Path) -> None:
    with guarded(models, tmp_path) as (server, file, key), grpc.insecure_channel(server.grpc) as channel:
        done: list[bool] = []

        def sent() -> Iterator[service_pb2.ModelInferRequest]:
            message = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=[bytes(8)])
            message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 1])
            yield message
            while not done:
                time.sleep(0.05)

        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(sent(), metadata=[("authorization", f"Bearer {key}")], timeout=SECONDS)
        assert not next(stream).error_message
        revoke(file)
        with pytest.raises(grpc.RpcError, match="got a removed or changed key"):
            next(stream)
        done.append(True)


def test_a_certificate_is_renewed_without_a_restart(models: Path, tmp_path: Path) -> None:
    ca = trustme.CA()
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"

    def issue() -> bytes:
        """Write a new certificate, its key a while later, and return what clients will see."""
        made = ca.issue_cert("127.0.0.1")
        made.cert_chain_pems[0].write_to_path(str(certificate))
        if key.exists():
            time.sleep(2)
            assert get() == first  # the certificate and the key are not of each other
        made.private_key_pem.write_to_path(str(key))
        return ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())

    def get() -> bytes | None:
        """Return the certificate that a new connection sees."""
        url = httpx.URL(server.address)
        context = ssl.create_default_context()
        ca.configure_trust(context)
        with (
            dial(url) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
        ):
            return stream.getpeercert(binary_form=True)

    def grpc_certificate() -> bytes:
        host, _, port = server.grpc.rpartition(":")
        context = ssl.create_default_context()
        ca.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port))) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
        ):
            found = stream.getpeercert(binary_form=True)
            assert found is not None
            return found

    first = issue()
    with serve(models, "--tls-cert-file", str(certificate), "--tls-key", str(key)) as server:
        context = ssl.create_default_context()
        ca.configure_trust(context)
        with httpx.Client(base_url=server.address, verify=context) as old:
            assert old.get("/readyz").status_code == 200
            assert get() == grpc_certificate() == first
            second = issue()
            deadline = time.monotonic() + SECONDS
            while get() != second or grpc_certificate() != second:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert old.get("/readyz").status_code == 200
        assert get() == second


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_signs_clients_is_followed(models: Path, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """The server knows the new ones only, whichever way a client comes, also with what it was given before."""
    ca, others = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key", "signers", "draft")}
    made = ca.issue_cert("127.0.0.1", "localhost")
    made.cert_chain_pems[0].write_to_path(str(files["certificate"]))
    made.private_key_pem.write_to_path(str(files["key"]))
    ca.cert_pem.write_to_path(str(files["signers"]))
    clients = {signer: signer.issue_cert("client.example") for signer in (ca, others)}
    contexts = {}
    for signer, client in clients.items():
        contexts[signer] = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
        client.configure_cert(contexts[signer])
        contexts[signer].maximum_version = version

    def let_in(signer: trustme.CA, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        """Return the session of a client that was answered, or None for one that was not."""
        with dial(url, SECONDS) as plain:
            try:
                stream = contexts[signer].wrap_socket(plain, server_hostname="localhost", session=session)
                stream.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer, found = stream.recv(100), stream.session
                stream.close()
                return found if answer.startswith(b"HTTP/1.1 200") else None
            except (ssl.SSLError, ConnectionError):  # with TLS 1.3 a client learns of it when it reads
                return None

    def let_in_over_grpc(signer: trustme.CA) -> bool:
        pems = clients[signer].private_key_pem.bytes(), clients[signer].cert_chain_pems[0].bytes()
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), *pems)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(server.grpc, credentials, options) as channel:
            try:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                return bool(stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=SECONDS).ready)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE  # noqa: PT017
                return False

    def write(content: bytes) -> None:
        files["draft"].write_bytes(content)
        files["draft"].rename(files["signers"])
        time.sleep(1.1)

    tls = [
        f"--tls-{option}={files[name]}"
        for option, name in (("cert-file", "certificate"), ("key", "key"), ("client-ca", "signers"))
    ]
    with serve(models, *tls) as server:
        url = httpx.URL(server.address)
        session = let_in(ca)
        assert session is not None
        assert let_in(others) is None
        assert let_in_over_grpc(ca)
        assert not let_in_over_grpc(others)
        write(b"nothing that is a certificate")
        assert let_in(ca)
        assert let_in_over_grpc(ca)
        write(others.cert_pem.bytes())
        assert let_in(others)
        assert let_in_over_grpc(others)
        assert let_in(ca) is None
        assert let_in(ca, session) is None
        assert not let_in_over_grpc(ca)
