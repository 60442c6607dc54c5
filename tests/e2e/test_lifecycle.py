"""Reloads and shutdown of a server. Real servers, real clients, real signals."""

import os
import signal
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.artifacts import make_repository
from tests.support.connections import dial, http_request
from tests.support.paths import PREBLOCK
from tests.support.processes import alive, children, fork_servers
from tests.support.processes import workers as workers_of
from tests.support.servers import Server, read_banner, serve
from tests.support.waiting import wait_until

SECONDS = 30
LARGE, WIDTH = (64, 500), 256
"""Rows and tokens of a request with an answer of 32 MB: more than any buffer holds."""
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with wide vectors, and little else to open."""
    return make_repository(tmp_path_factory.mktemp("life"), gpt="gpt-50x256x600")


def request(rows: int = LARGE[0], length: int = LARGE[1]) -> bytes:
    """Return a request for vectors; a large one by default."""
    return http_request(f"/models/gpt/embed?shape={rows},{length}", bytes(8 * rows * length), BYTES)


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
def test_large_response_is_finished_on_shutdown(models: Path, alike: bool) -> None:
    with serve(models) as server:
        if alike:
            with connected(server) as stream:
                stream.sendall(request())
                assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
        with connected(server) as stream:
            stream.sendall(request())
            stream.recv(10, socket.MSG_PEEK)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(ConnectionRefusedError):  # nobody new
                connected(server)
            assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("late", [1, 8])
def test_partial_fast_path_request_is_finished_on_shutdown(models: Path, late: int) -> None:
    """Their last bytes, or all of their bodies, come when the end has begun."""
    small = request(1, 1)
    with serve(models) as server, connected(server) as stream:
        for _ in range(3):
            stream.sendall(small)
            assert read_large(stream) == 4 * WIDTH
        stream.sendall(small[:-late])
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        stream.sendall(small[-late:])
        assert read_large(stream) == 4 * WIDTH
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_second_sigterm_stops_server_immediately(models: Path, tmp_path: Path, workers: str) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", workers]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        address = httpx.URL(read_banner(process)[1])
        httpx.get(address.join("/readyz"), timeout=SECONDS)
        family = [*children(process.pid), *workers_of(process.pid)]
        with dial(address) as stream:
            stream.sendall(request())  # without a reader of the answer
            stream.recv(10, socket.MSG_PEEK)
            process.send_signal(signal.SIGTERM)
            time.sleep(1.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 128 + signal.SIGTERM
    wait_until(lambda: not any(map(alive, family)))
    assert list(tmp_path.iterdir()) == []


def test_sigterm_before_workers_start_stops_server(models: Path, tmp_path: Path) -> None:
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        wait_until(lambda: fork_servers(process.pid), pause=0.005)
        (server,) = fork_servers(process.pid)
        os.kill(server, signal.SIGSTOP)  # it would import for a while
        time.sleep(0.5)
        process.terminate()
        os.kill(server, signal.SIGCONT)  # Python 3.13 waits at its end for the holders of the resource tracker
        assert process.wait(SECONDS) == 0
        wait_until(lambda: not alive(server))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_is_ignored(models: Path, workers: str) -> None:
    with serve(models, "--workers", workers) as server, httpx.Client(base_url=server.address, timeout=30) as client:
        assert client.get("/readyz").status_code == 200
        before = workers_of(server.pid)
        server.process.send_signal(signal.SIGHUP)
        for child in before:  # as a closed terminal sends it
            os.kill(child, signal.SIGHUP)
        time.sleep(1)
        assert client.get("/readyz").status_code == 200
        assert workers_of(server.pid) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_process_group_finishes_requests(models: Path, number: signal.Signals) -> None:
    """As a terminal sends it, or a stop of a whole control group."""
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", "0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            address = httpx.URL(read_banner(process)[1])
            with dial(address, SECONDS) as stream:
                stream.sendall(request())
                stream.recv(10, socket.MSG_PEEK)
                family = [process.pid, *children(process.pid), *workers_of(process.pid)]
                os.killpg(process.pid, number)
                time.sleep(1.5)
                assert process.poll() is None
                assert read_large(stream) == 4 * WIDTH * LARGE[0] * LARGE[1]
            assert process.wait(SECONDS) == 0
            wait_until(lambda: not any(map(alive, family)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_certificate_is_reloaded_without_restart(models: Path, tmp_path: Path) -> None:
    ca = trustme.CA()
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"

    def issue() -> bytes:
        """Write a new certificate, its key a while later, and return it in DER."""
        made = ca.issue_cert("127.0.0.1")
        made.cert_chain_pems[0].write_to_path(str(certificate))
        if key.exists():
            time.sleep(2)
            assert get() == first  # the certificate and the key are not of each other
        made.private_key_pem.write_to_path(str(key))
        return ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())

    def get() -> bytes | None:
        """Return the certificate of a new connection."""
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
            wait_until(lambda: get() == grpc_certificate() == second, pause=0.2)
            assert old.get("/readyz").status_code == 200
        assert get() == second


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_client_ca_is_reloaded(models: Path, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """The server accepts the new authority only, also for resumed sessions."""
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
        """Return the session of an accepted client, or None."""
        with dial(url, SECONDS) as plain:
            try:
                with contexts[signer].wrap_socket(plain, server_hostname="localhost", session=session) as stream:
                    stream.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return stream.session if stream.recv(100).startswith(b"HTTP/1.1 200") else None
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
        time.sleep(2)

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
