"""TLS at every protocol, CORS and trusted proxies: real servers, real clients."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import trustme
from tritonclient.grpc import service_pb2, service_pb2_grpc
from websockets import InvalidStatus
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import connect as connect_socket

from preblock.service.server.lingering_close import MAX_TLS_SECONDS
from tests.cli.command_line import failing
from tests.reliability.wires import UPGRADE, frame, received
from tests.support.connections import dial, http_request
from tests.support.servers import Server, serve

PAGE, EVIL = "https://pages.example", "https://evil.example"
GET = http_request("/livez", method="GET")
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}


@dataclass(frozen=True)
class Files:
    """Certificate and key of the server, the authority of all certificates, and the client's certificate."""

    certificate: Path
    key: Path
    ca: Path
    client: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("client.example")
    found = Files(*(folder / f"{name}.pem" for name in ("certificate", "key", "ca", "client")))
    server.cert_chain_pems[0].write_to_path(str(found.certificate))
    server.private_key_pem.write_to_path(str(found.key))
    ca.cert_pem.write_to_path(str(found.ca))
    client.private_key_and_cert_chain_pem.write_to_path(str(found.client))
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mtls"])
def secure(request: pytest.FixtureRequest, tiny_repository: Path, files: Files) -> Iterator[tuple[Server, bool]]:
    """A server with TLS, and whether it asks clients for a certificate."""
    options = ["--tls-cert-file", str(files.certificate), "--tls-key", str(files.key)]
    if request.param:
        options += ["--tls-client-ca", str(files.ca)]
    with serve(tiny_repository, *options) as server:
        yield server, request.param


def context(files: Files, certificate: bool) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(files.ca))
    if certificate:
        made.load_cert_chain(files.client)
    return made


@contextmanager
def connected(server: Server, tls: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with dial(server.address) as plain, tls.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
        yield stream


def ready_over_grpc(server: Server, files: Files, certificate: bool) -> bool:
    pem = files.client.read_bytes() if certificate else None
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), pem, pem)
    with grpc.secure_channel(server.grpc, credentials) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ModelReady(service_pb2.ModelReadyRequest(name="gpt"), timeout=20).ready)


async def first_offset(server: Server, tls: ssl.SSLContext) -> Any:
    """The client with threads reads and writes one TLS connection at once, which Python's ssl does not support."""
    async with connect_async(f"{server.socket}/models/gpt/decode", ssl=tls, open_timeout=60) as stream:
        await stream.send('{"input_ids": [1]}')
        return json.loads(await stream.recv())["next_offset"]


def test_every_protocol_works_over_tls(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    tls = context(files, certificate=asked)
    assert server.address.startswith("https://")
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        tls.maximum_version = version
        with httpx.Client(base_url=server.address, verify=tls, timeout=60) as http:
            assert http.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200
        assert asyncio.run(first_offset(server, tls)) == [1]
    assert ready_over_grpc(server, files, certificate=asked)


def test_client_sees_end_of_closed_stream_at_once_over_tls(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    waits = []
    for _ in range(5):
        with connected(server, context(files, certificate=asked)) as stream:
            stream.sendall(UPGRADE)
            assert stream.recv(2**16).startswith(b"HTTP/1.1 101 ")
            begin = time.monotonic()
            stream.sendall(frame(8, b"\x03\xe8"))
            assert received(stream) == b"\x88\x02\x03\xe8"
            waits.append(time.monotonic() - begin)
    assert min(waits) < MAX_TLS_SECONDS


def test_responses_before_malformed_request_arrive_over_tls(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    with connected(server, context(files, certificate=asked)) as stream:
        stream.sendall(GET * 3 + b"\x00garbage\r\n\r\n" + bytes(2**18))
        answer = received(stream)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3 + [b"400"]


def test_plaintext_or_untrusted_connection_to_tls_server_fails(secure: tuple[Server, bool]) -> None:
    server, _ = secure
    plain = server.address.replace("https", "http")
    for method in ("GET", "HEAD", "POST", "PUT"):
        answer = httpx.request(method, f"{plain}/livez", timeout=60)
        assert answer.status_code == 400
        assert method == "HEAD" or answer.text == "this port speaks TLS: use https:// in place of http://\n"
    for sent in (b"SSH-2.0-client\r\n", bytes(200)):
        begin = time.monotonic()
        with dial(server.address) as stream, suppress(ConnectionResetError):
            stream.sendall(sent)
            assert stream.recv(2**16) == b""
        assert time.monotonic() - begin < 15
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest(), timeout=5)
    with pytest.raises(httpx.ConnectError):  # the authority is not trusted
        httpx.get(f"{server.address}/livez", timeout=60)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_refused_handshake_gets_its_alert(secure: tuple[Server, bool], files: Files) -> None:
    """With TLS 1.3 a client learns of a refusal when it reads."""
    server, asked = secure
    for version, alert, needs_certificate in (
        (ssl.TLSVersion.TLSv1_1, "TLSV1_ALERT_PROTOCOL_VERSION", False),
        (ssl.TLSVersion.TLSv1_2, "SSLV3_ALERT_HANDSHAKE_FAILURE", True),
        (ssl.TLSVersion.TLSv1_3, "TLSV13_ALERT_CERTIFICATE_REQUIRED", True),
    ):
        client, reason = context(files, certificate=False), ""
        client.set_ciphers("ALL:@SECLEVEL=0")
        client.minimum_version = client.maximum_version = version
        try:
            with connected(server, client) as stream:
                stream.sendall(GET)
                assert stream.recv(2**16).startswith(b"HTTP/1.1 200")
        except ssl.SSLError as refused:
            reason = refused.reason
        assert reason == (alert if asked or not needs_certificate else "")


def test_client_with_foreign_or_no_certificate_is_rejected(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    stranger = context(files, certificate=False)
    trustme.CA().issue_cert("client.example").configure_cert(stranger)
    refusal: AbstractContextManager[object] = pytest.raises(httpx.HTTPError) if asked else nullcontext()
    with refusal:
        httpx.get(f"{server.address}/livez", verify=stranger, timeout=60)
    refusal = pytest.raises(grpc.RpcError) if asked else nullcontext()
    with refusal:
        assert ready_over_grpc(server, files, certificate=False)


def test_unfinished_handshake_ends_at_its_time_limit(tiny_repository: Path, files: Files) -> None:
    options = "--tls-cert-file", str(files.certificate), "--tls-key", str(files.key), "--header-timeout-seconds", "1"
    with serve(tiny_repository, *options) as server:
        for address in (server.address, f"https://{server.grpc}"):
            begin = time.monotonic()
            with dial(address) as stream, suppress(ConnectionResetError):
                stream.sendall(b"\x16\x03\x01\x02\x00")
                assert stream.recv(2**16) == b""
            assert 0.5 < time.monotonic() - begin < 15


def test_serve_with_unusable_tls_files_fails(tiny_repository: Path, files: Files) -> None:
    folder = files.ca.parent
    certificate, key, authority, none = (folder / f"{name}.pem" for name in ("certificate", "key", "ca", "none"))
    alone, no_pair = (
        "is set alone; TLS needs tls_cert_file and tls_key",
        "are no PEM files of a certificate and its key",
    )
    for options, message in (
        ({"cert-file": certificate}, f"tls_cert_file {alone}"),
        ({"key": key}, f"tls_key {alone}"),
        ({"client-ca": authority}, f"tls_client_ca {alone}"),
        ({"cert-file": none, "key": key}, f"{no_pair}: No such file"),
        ({"cert-file": authority, "key": key}, f"{no_pair}: KEY_VALUES_MISMATCH"),
        ({"cert-file": key, "key": key}, f"tls_cert_file: {key} and {key} are no PEM files of a certificate"),
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
    assert not any(name.startswith("access-control") for name in (*closed.headers, *listed.headers))


def test_cors_response_body_is_unchanged(open_to_a_page: Server, tiny_server: Server) -> None:
    content = {"input_ids": [[1, 2]] * 2000, "encoding": "float"}
    page = {"Origin": PAGE, "X-Forwarded-For": "203.0.113.9"}
    one, other = (
        httpx.post(f"{server.address}/models/gpt/embed", json=content, headers=headers, timeout=60)
        for server, headers in ((open_to_a_page, page), (tiny_server, {}))
    )
    assert one.content == other.content
    assert "Preblock-Shape" in one.headers["Access-Control-Expose-Headers"]


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
