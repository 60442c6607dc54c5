"""TLS at every protocol, Unix sockets, CORS and trusted proxies: real servers, real clients."""

import asyncio
import gc
import json
import os
import re
import signal
import ssl
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import numpy as np
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc
from websockets import InvalidStatus
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import connect as connect_socket

import preblock
from preblock.client.errors import ConnectionFailed
from preblock.service.server.addresses import UnixListener
from preblock.service.server.lingering_close import MAX_TLS_SECONDS
from tests.cli.command_line import failing
from tests.reliability.wires import UPGRADE, frame, received
from tests.support.connections import dial, http_request
from tests.support.open_inference import OWN_CONNECTION, infer_message, open_stub
from tests.support.paths import PREBLOCK
from tests.support.processes import workers
from tests.support.servers import Server, serve
from tests.support.tls import TlsFiles
from tests.support.waiting import wait_until

PAGE, EVIL = "https://pages.example", "https://evil.example"
GET = http_request("/livez", method="GET")
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}


@dataclass(frozen=True)
class Secure:
    """A server with TLS, whether it asks clients for a certificate, and what a client of it needs."""

    server: Server
    asks: bool
    tls: TlsFiles
    certificate: trustme.LeafCert

    def context(self) -> ssl.SSLContext:
        return self.tls.context(self.certificate if self.asks else None)


def is_ready_over_grpc(server: Server, tls: TlsFiles, certificate: trustme.LeafCert | None) -> bool:
    own = (certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes()) if certificate else ()
    credentials = grpc.ssl_channel_credentials(tls.ca.cert_pem.bytes(), *own)
    with grpc.secure_channel(server.grpc, credentials, [OWN_CONNECTION]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ModelReady(service_pb2.ModelReadyRequest(name="gpt"), timeout=20).ready)


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mtls"])
def secure(
    request: pytest.FixtureRequest, tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    tls = TlsFiles(folder)
    tls.ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    asked = ("--tls-client-ca", str(folder / "ca.pem")) if request.param else ()
    with serve(tiny_repository, *tls.options, *asked) as server:
        yield Secure(server, request.param, tls, tls.ca.issue_cert("client.example"))


async def first_offset(server: Server, tls: ssl.SSLContext) -> Any:
    """The client with threads reads and writes one TLS connection at once, which Python's ssl does not support."""
    async with connect_async(f"{server.socket}/models/gpt/decode", ssl=tls, open_timeout=60) as stream:
        await stream.send('{"input_ids": [1]}')
        return json.loads(await stream.recv())["next_offset"]


def test_every_protocol_works_over_tls(secure: Secure) -> None:
    assert secure.server.address.startswith("https://")
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context = secure.context()
        context.maximum_version = version
        with httpx.Client(base_url=secure.server.address, verify=context, timeout=60) as http:
            assert http.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200
        assert asyncio.run(first_offset(secure.server, context)) == [1]
    assert is_ready_over_grpc(secure.server, secure.tls, secure.certificate if secure.asks else None)


def test_client_sees_end_of_closed_stream_at_once_over_tls(secure: Secure) -> None:
    waits = []
    for _ in range(5):
        with secure.tls.connect(secure.server.address, secure.context()) as stream:
            stream.sendall(UPGRADE)
            assert stream.recv(2**16).startswith(b"HTTP/1.1 101 ")
            begin = time.monotonic()
            stream.sendall(frame(8, b"\x03\xe8"))
            assert received(stream) == b"\x88\x02\x03\xe8"
            waits.append(time.monotonic() - begin)
    assert min(waits) < MAX_TLS_SECONDS


def test_responses_before_malformed_request_arrive_over_tls(secure: Secure) -> None:
    with secure.tls.connect(secure.server.address, secure.context()) as stream:
        stream.sendall(GET * 3 + b"\x00garbage\r\n\r\n" + bytes(2**18))
        answer = received(stream)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3 + [b"400"]


def test_plaintext_or_untrusted_connection_to_tls_server_fails(secure: Secure) -> None:
    plain = secure.server.address.replace("https", "http")
    for method in ("GET", "HEAD", "POST", "PUT"):
        answer = httpx.request(method, f"{plain}/livez", timeout=60)
        assert answer.status_code == 400
        assert method == "HEAD" or answer.text == "this port speaks TLS: use https:// in place of http://\n"
    for sent in (b"SSH-2.0-client\r\n", bytes(200)):
        begin = time.monotonic()
        with dial(plain) as stream, suppress(ConnectionResetError):
            stream.sendall(sent)
            assert stream.recv(2**16) == b""
        assert time.monotonic() - begin < 15
    with grpc.insecure_channel(secure.server.grpc) as channel, pytest.raises(grpc.RpcError):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest(), timeout=5)
    with pytest.raises(httpx.ConnectError):  # the authority is not trusted
        httpx.get(f"{secure.server.address}/livez", timeout=60)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_refused_handshake_gets_its_alert(secure: Secure) -> None:
    """With TLS 1.3 a client learns of a refusal when it reads."""
    for version, alert, needs_certificate in (
        (ssl.TLSVersion.TLSv1_1, "TLSV1_ALERT_PROTOCOL_VERSION", False),
        (ssl.TLSVersion.TLSv1_2, "SSLV3_ALERT_HANDSHAKE_FAILURE", True),
        (ssl.TLSVersion.TLSv1_3, "TLSV13_ALERT_CERTIFICATE_REQUIRED", True),
    ):
        context, reason = secure.tls.context(), ""
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        try:
            with secure.tls.connect(secure.server.address, context) as stream:
                stream.sendall(GET)
                assert stream.recv(2**16).startswith(b"HTTP/1.1 200")
        except ssl.SSLError as refused:
            reason = refused.reason
        assert reason == (alert if secure.asks or not needs_certificate else "")


def test_grpc_client_without_certificate_is_rejected(secure: Secure) -> None:
    with pytest.raises(grpc.RpcError) if secure.asks else nullcontext():
        assert is_ready_over_grpc(secure.server, secure.tls, None)


def test_unfinished_handshake_ends_at_its_time_limit(tiny_repository: Path, tmp_path: Path) -> None:
    with serve(tiny_repository, *TlsFiles(tmp_path).options, "--header-timeout-seconds", "1") as server:
        for address in (server.address, f"https://{server.grpc}"):
            begin = time.monotonic()
            with dial(address) as stream, suppress(ConnectionResetError):
                stream.sendall(b"\x16\x03\x01\x02\x00")
                assert stream.recv(2**16) == b""
            assert 0.5 < time.monotonic() - begin < 15


def test_serve_with_unusable_tls_files_fails(tiny_repository: Path, tmp_path: Path) -> None:
    tls, authority = TlsFiles(tmp_path), tmp_path / "ca.pem"
    tls.ca.cert_pem.write_to_path(str(authority))
    certificate, key = tls.certificate, tls.key
    alone, no_pair = (
        "is set alone; TLS needs tls_cert_file and tls_key",
        "are no PEM files of a certificate and its key",
    )
    for options, message in (
        ({"cert-file": certificate}, f"tls_cert_file {alone}"),
        ({"key": key}, f"tls_key {alone}"),
        ({"client-ca": authority}, f"tls_client_ca {alone}"),
        ({"cert-file": tmp_path / "none", "key": key}, f"{no_pair}: No such file"),
        ({"cert-file": authority, "key": key}, f"{no_pair}: KEY_VALUES_MISMATCH"),
        ({"cert-file": certificate, "key": key, "client-ca": key}, f"{key} is no PEM file of certificates: "),
    ):
        given = [text for name, file in options.items() for text in (f"--tls-{name}", file)]
        assert message in failing("serve", "--repository", tiny_repository, "--port", "0", *given, code=1)


@pytest.fixture(scope="module")
def open_to_a_page(tiny_repository: Path) -> Iterator[Server]:
    options = {"PREBLOCK_CORS_ORIGINS": f"{PAGE}, http://other.example", "PREBLOCK_TRUSTED_PROXIES": "127.0.0.0/8"}
    with serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01", **options) as server:
        yield server


def preflight(server: Server, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return httpx.options(f"{server.address}/models/gpt/embed", headers={"Origin": origin, **asked}, timeout=60)


def test_cors_allows_only_configured_origin(open_to_a_page: Server, tiny_server: Server) -> None:
    answer = preflight(open_to_a_page, PAGE)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert preflight(open_to_a_page, EVIL).status_code == 400
    closed = preflight(tiny_server, PAGE)
    assert (closed.status_code, closed.headers["Allow"]) == (204, "POST, OPTIONS")
    for server, origin, allowed in (
        (open_to_a_page, PAGE, PAGE),
        (open_to_a_page, EVIL, None),
        (tiny_server, PAGE, None),
    ):
        listed = httpx.get(f"{server.address}/models", headers={"Origin": origin}, timeout=60)
        assert (listed.status_code, listed.headers.get("Access-Control-Allow-Origin")) == (200, allowed)
        assert allowed is None or "Preblock-Shape" in listed.headers["Access-Control-Expose-Headers"]
    assert not any(name.startswith("access-control") for name in (*closed.headers, *listed.headers))


def test_websocket_opens_for_own_and_allowed_origins_only(open_to_a_page: Server, tiny_server: Server) -> None:
    def status(server: Server, number: int, origin: str) -> str:
        """Open a stream for a client of its own, as the proxy tells it."""
        headers = {"Origin": origin, "X-Forwarded-For": f"198.51.100.{number}"}
        try:
            with connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers):
                return "101"
        except InvalidStatus as refused:
            return f"{refused.response.status_code} {json.loads(refused.response.body or b'')['field']}"

    assert [status(tiny_server, 1, tiny_server.address), status(open_to_a_page, 2, PAGE)] == ["101"] * 2
    assert status(tiny_server, 3, PAGE) == "403 Origin"
    for origin in (EVIL, "null", f"{PAGE}:444", ""):
        assert [status(server, 4, origin) for server in (open_to_a_page, tiny_server)] == ["403 Origin"] * 2, origin


def statuses(server: Server, addresses: list[str], known: bool = False) -> list[int]:
    """Ask once from each address, as a proxy would tell it; the connection itself answers known requests of ids."""
    with httpx.Client(base_url=server.address, timeout=60) as client:

        def ask(address: str) -> int:
            headers = {"X-Forwarded-For": address}
            if known:
                ids = np.array([1, 2, 3]).tobytes()
                return client.post("/models/gpt/embed?shape=1,3", content=ids, headers=BYTES | headers).status_code
            return client.post("/models/gpt/embed", json={"input_ids": [1]}, headers=headers).status_code

        return [ask(address) for address in addresses]


def test_rate_limit_uses_caller_address_of_trusted_proxy(open_to_a_page: Server, tiny_repository: Path) -> None:
    asked = ["203.0.113.1", "203.0.113.1", "203.0.113.2", "203.0.113.1, 203.0.113.3", "203.0.113.3"]
    assert statuses(open_to_a_page, asked) == [200, 429, 200, 200, 429]
    asked = [f"198.51.100.{number}" for number in (10, 11, 12, 10, 13)]
    assert statuses(open_to_a_page, asked, known=True) == [200, 200, 200, 429, 200]
    with serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01") as server:  # without a trusted proxy
        assert statuses(server, ["203.0.113.1", "203.0.113.2"]) == [200, 429]


IDS = [[1, 2, 3], [4, 5, 6]]
EMBED: dict[str, Any] = {"url": "http://localhost/models/gpt/embed", "json": {"input_ids": IDS}}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="preblock ") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def unix(folder: Path, tiny_repository: Path) -> Iterator[Server]:
    """A server on `http.sock` and `grpc%20.sock`; the banner has the syntax of a shell and of gRPC."""
    paths = "--uds", str(folder / "http.sock"), "--grpc-uds", str(folder / "grpc%20.sock")
    with serve(tiny_repository, *paths) as server:
        yield server


def open_http(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)))


def test_http_and_grpc_over_unix_socket_match_tcp(unix: Server, folder: Path, tiny_server: Server) -> None:
    with open_http(folder / "http.sock") as http:
        answer, index = http.post(**EMBED), http.get("http://any.example/")
    expected = httpx.post(f"{tiny_server.address}/models/gpt/embed", json=EMBED["json"])
    assert (answer.status_code, answer.content) == (200, expected.content)
    assert index.json()["protocols"]["grpc_port"] is None
    address = f"unix:{quote(str(folder / 'grpc%20.sock'))}"
    assert f"gRPC on {address}" in unix.banner
    with open_stub(address) as ours, open_stub(tiny_server.grpc) as theirs:
        found, told = (stub.ModelInfer(infer_message(IDS), timeout=30) for stub in (ours, theirs))
    assert found.raw_output_contents == told.raw_output_contents


def test_banner_command_over_unix_socket_works(unix: Server, folder: Path) -> None:
    command = unix.banner.splitlines()[-1].strip()
    assert command.startswith(f"curl --unix-socket '{folder / 'http.sock'}' http://localhost/models/")
    answer = subprocess.run(["sh", "-c", f"{command} --fail --silent"], capture_output=True, text=True, check=True)
    assert '"shape":[1,4,4]' in answer.stdout


def test_clients_and_streams_over_unix_socket_match_tcp(unix: Server, tiny_server: Server) -> None:
    async def ask(address: str) -> list[Any]:
        async with preblock.connect_async(address) as client, client.decode("gpt", rows=2) as stream:
            return [(await client.embed(IDS, model="gpt")).vectors, await stream.step([[5], [6]])]

    answers = [asyncio.run(ask(address)) for address in (unix.address, tiny_server.address)]
    with preblock.connect(unix.address) as client, client.decode("gpt", rows=2) as stream:
        answers.append([client.embed(IDS, model="gpt").vectors, stream.step([[5], [6]])])
    assert len({b"".join(vectors.tobytes() for vectors in answer) for answer in answers}) == 1


@pytest.mark.usefixtures("unix")
def test_serve_with_unusable_socket_fails_and_keeps_it(folder: Path, tiny_repository: Path, tmp_path: Path) -> None:
    file, http, calls = tmp_path / "file", folder / "http.sock", folder / "grpc%20.sock"
    file.write_text("mine")
    cases: tuple[tuple[list[str | Path], str], ...] = (
        (["--uds", http], f"the socket {http} is already in use"),
        (["--grpc-uds", file], f"{file} exists, and is not a socket"),
        (["--workers", "2", "--grpc-uds", file], "--grpc-uds works with one worker, and workers is 2: gRPC cannot "),
        (["--uds", file, "--grpc-uds", file], f"--uds and --grpc-uds are both {file}; each needs its own socket"),
    )
    for options, message in cases:
        told = failing("serve", "--repository", tiny_repository, "--port", "0", *options, code=1)
        assert told.startswith(message)
    with open_http(http) as client:
        assert client.post(**EMBED).status_code == 200
    assert (file.read_text(), {path.name for path in folder.iterdir()}) == ("mine", {http.name, calls.name})


def test_workers_share_socket_and_remove_its_file(tiny_repository: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "http.sock")
        with serve(tiny_repository, "--workers", "2", "--uds", str(path)) as server, open_http(path) as http:
            assert list(Path(name).iterdir()) == [path]
            expected = http.post(**EMBED).content
            wait_until(lambda: len(workers(server.pid)) == 2, 30)
            killed = workers(server.pid)[0]
            os.kill(killed, signal.SIGKILL)
            # Its connections stay open until its last thread has ended; before, it may be a zombie.
            wait_until(lambda: not Path(f"/proc/{killed}").exists(), 30)
            with preblock.connect(server.address) as client:
                assert client.embed(IDS, model="gpt").vectors.shape[:2] == (2, 3)
            assert http.post(**EMBED).content == expected
        assert not list(Path(name).iterdir())


def test_stale_sockets_are_replaced_and_clients_share_a_rate(tiny_repository: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        http_path, grpc_path = Path(name, "http.sock"), Path(name, "grpc.sock")
        options = "--uds", str(http_path), "--grpc-uds", str(grpc_path), "--access-log-sample-rate", "1"
        command = [PREBLOCK, "serve", "--repository", str(tiny_repository), *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_until(lambda: http_path.exists() and grpc_path.exists(), 60)
            process.kill()
        assert http_path.is_socket()
        assert grpc_path.is_socket()
        with serve(tiny_repository, *options, "--rate-limit-per-second", "0.001"):
            with open_http(http_path) as first, open_http(http_path) as second:
                assert [client.post(**EMBED).status_code for client in (first, second)] == [200, 429]
            with open_stub(f"unix:{grpc_path}") as stub, pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
                stub.ModelInfer(infer_message(IDS), timeout=30)
        assert not list(Path(name).iterdir())


def test_socket_mode_follows_umask(folder: Path) -> None:
    for mask, mode in ((0o077, 0o700), (0o007, 0o770)):
        path, before = folder / f"mode{mask}", os.umask(mask)
        try:
            with UnixListener("uds", path) as listener:
                assert not path.exists()
                listener.listen(1)
                assert stat.S_IMODE(path.stat().st_mode) == mode
        finally:
            os.umask(before)
        assert not path.exists()


def test_shutdown_keeps_socket_of_other_server(folder: Path) -> None:
    path = folder / "other"
    with UnixListener("uds", path) as ours:
        ours.listen(1)
        path.unlink()
        with UnixListener("uds", path) as other:
            other.listen(1)
            ours.__exit__()
            assert path.is_socket()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # httpcore does not close a socket without a connection
def test_client_error_names_path_of_missing_socket(folder: Path) -> None:
    address = f"http+unix://{quote(str(folder / 'none'), safe='')}/prefix"
    with preblock.connect(address, retries=0) as client:
        with pytest.raises(ConnectionFailed, match=f"cannot connect to {folder / 'none'} "):
            client.embed(IDS, model="gpt")
        with pytest.raises(ConnectionFailed, match=f"no connection to {folder / 'none'} "):
            client.decode("gpt", rows=1).__enter__()
    gc.collect()  # since Python 3.12 an error of httpcore keeps the socket in a cycle
