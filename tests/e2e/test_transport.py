"""TLS at every protocol, CORS and trusted proxies: real servers, real clients."""

import asyncio
import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
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
from tests.support.connections import dial
from tests.support.paths import PREBLOCK
from tests.support.servers import Server, serve

PAGE = "https://pages.example"
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
    with httpx.Client(base_url=server.address, verify=tls, timeout=60) as http:
        assert http.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200
    assert asyncio.run(first_offset(server, tls)) == [1]
    assert ready_over_grpc(server, files, certificate=asked)


def test_client_sees_end_of_closed_stream_at_once_over_tls(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    path, host = "/models/gpt/decode", "127.0.0.1"
    head = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    waits = []
    for _ in range(5):
        with (
            dial(server.address) as plain,
            context(files, certificate=asked).wrap_socket(plain, server_hostname=host) as stream,
        ):
            stream.sendall(head.encode())
            assert stream.recv(2**16).startswith(b"HTTP/1.1 101 ")
            begin = time.monotonic()
            stream.sendall(b"\x88\x82" + bytes(4) + b"\x03\xe8")
            assert b"".join(iter(lambda: stream.recv(2**16), b"")) == b"\x88\x02\x03\xe8"
            waits.append(time.monotonic() - begin)
    assert min(waits) < MAX_TLS_SECONDS


def test_responses_before_malformed_request_arrive_over_tls(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    good = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        dial(server.address) as plain,
        context(files, certificate=asked).wrap_socket(plain, server_hostname="127.0.0.1") as stream,
    ):
        stream.sendall(good * 3 + b"\x00garbage\r\n\r\n" + bytes(2**18))
        answer = b"".join(iter(lambda: stream.recv(2**16), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3 + [b"400"]


def test_plaintext_or_untrusted_connection_to_tls_server_fails(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    plain = server.address.replace("https", "http")
    for method in ("GET", "HEAD", "POST", "PUT"):
        answer = httpx.request(method, f"{plain}/livez", timeout=60)
        assert answer.status_code == 400
        assert method == "HEAD" or answer.text == "this port speaks TLS: use https:// in place of http://\n"
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(service_pb2.ServerLiveRequest(), timeout=5)
    with pytest.raises(httpx.ConnectError):  # the authority is not trusted
        httpx.get(f"{server.address}/livez", timeout=60)
    old = context(files, certificate=asked)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert httpx.get(f"{server.address}/livez", verify=old, timeout=60).status_code == 200


def test_client_without_required_certificate_is_rejected(secure: tuple[Server, bool], files: Files) -> None:
    server, asked = secure
    if not asked:
        assert httpx.get(f"{server.address}/livez", verify=context(files, False), timeout=60).status_code == 200
        return
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.address}/livez", verify=context(files, certificate=False), timeout=60)
    with pytest.raises(grpc.RpcError):
        ready_over_grpc(server, files, certificate=False)
    stranger = context(files, certificate=False)
    trustme.CA().issue_cert("client.example").configure_cert(stranger)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.address}/livez", verify=stranger, timeout=60)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(
    ("version", "alert"),
    [
        ("TLSv1_1", "TLSV1_ALERT_PROTOCOL_VERSION"),
        ("TLSv1_2", "SSLV3_ALERT_HANDSHAKE_FAILURE"),
        ("TLSv1_3", "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
    ],
)
def test_refused_handshake_gets_its_alert(secure: tuple[Server, bool], files: Files, version: str, alert: str) -> None:
    server, asked = secure
    client = context(files, certificate=False)
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = ssl.TLSVersion[version]

    def read() -> bytes:
        with dial(server.address) as plain, client.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
            stream.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return stream.recv(2**16)  # with TLS 1.3 a client learns of a refusal when it reads

    if version != "TLSv1_1" and not asked:
        assert read().startswith(b"HTTP/1.1 200")
        return
    with pytest.raises(ssl.SSLError) as refused:
        read()
    assert refused.value.reason == alert


def test_unfinished_handshake_ends_at_its_time_limit(tiny_repository: Path, files: Files) -> None:
    options = "--tls-cert-file", str(files.certificate), "--tls-key", str(files.key), "--header-timeout-seconds", "1"
    with serve(tiny_repository, *options) as server:
        for address in (server.address, f"https://{server.grpc}"):
            begin = time.monotonic()
            with dial(address) as stream, suppress(ConnectionResetError):
                stream.sendall(b"\x16\x03\x01\x02\x00")
                assert stream.recv(2**16) == b""
            assert 0.5 < time.monotonic() - begin < 15


def test_input_without_tls_is_closed_at_once(secure: tuple[Server, bool]) -> None:
    server, _ = secure
    for sent in (b"SSH-2.0-client\r\n", bytes(200)):
        begin = time.monotonic()
        with dial(server.address) as stream, suppress(ConnectionResetError):
            stream.sendall(sent)
            assert stream.recv(2**16) == b""
        assert time.monotonic() - begin < 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cert-file": "certificate"}, "tls_cert_file is set alone; TLS needs tls_cert_file and tls_key"),
        ({"key": "key"}, "tls_key is set alone; TLS needs tls_cert_file and tls_key"),
        ({"client-ca": "ca"}, "tls_client_ca is set alone; TLS needs tls_cert_file and tls_key"),
        ({"cert-file": "none", "key": "key"}, "are no PEM files of a certificate and its key: No such file"),
        ({"cert-file": "ca", "key": "key"}, "are no PEM files of a certificate and its key: KEY_VALUES_MISMATCH"),
        ({"cert-file": "key", "key": "key"}, "tls_cert_file: {key} and {key} are no PEM files of a certificate"),
        (
            {"cert-file": "certificate", "key": "key", "client-ca": "key"},
            "tls_client_ca: {key} is no PEM file of certificates: ",
        ),
    ],
)
def test_serve_with_unusable_tls_files_fails(
    tiny_repository: Path, files: Files, options: dict[str, str], message: str
) -> None:
    folder = files.ca.parent
    given = [text for name, file in options.items() for text in (f"--tls-{name}", f"{file}.pem")]
    command: list[str | Path] = [PREBLOCK, "serve", "--repository", tiny_repository, "--port", "0", *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    names = {path.stem: path.name for path in folder.iterdir()}
    assert message.format(**names) in done.stderr


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
    assert preflight(open_to_a_page, "https://evil.example").status_code == 400
    for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
        listed = httpx.get(f"{open_to_a_page.address}/models", headers={"Origin": origin}, timeout=60)
        assert (listed.status_code, listed.headers.get("Access-Control-Allow-Origin")) == (200, allowed)
    refused = preflight(tiny_server, PAGE)
    assert (refused.status_code, refused.headers["Allow"]) == (204, "POST, OPTIONS")
    assert not any(name.startswith("access-control") for name in refused.headers)
    closed = httpx.get(f"{tiny_server.address}/models", headers={"Origin": PAGE}, timeout=60)
    assert not any(name.startswith("access-control") for name in closed.headers)


def test_cors_response_body_is_unchanged(open_to_a_page: Server, tiny_server: Server) -> None:
    content = {"input_ids": [[1, 2]] * 2000, "encoding": "float"}
    page = {"Origin": PAGE, "X-Forwarded-For": "203.0.113.9"}
    one, other = (
        httpx.post(f"{server.address}/models/gpt/embed", json=content, headers=headers, timeout=60)
        for server, headers in ((open_to_a_page, page), (tiny_server, {}))
    )
    assert one.content == other.content
    assert "Preblock-Shape" in one.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://pages.example:444", ""])
def test_websocket_from_foreign_origin_returns_403(open_to_a_page: Server, tiny_server: Server, origin: str) -> None:
    for server in (open_to_a_page, tiny_server):
        with (
            pytest.raises(InvalidStatus) as refused,
            connect_socket(f"{server.socket}/models/gpt/decode", additional_headers={"Origin": origin}),
        ):
            pass
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body or b"")["field"] == "Origin"


def test_websocket_from_allowed_origin_opens(open_to_a_page: Server, tiny_server: Server) -> None:
    for number, (server, origin) in enumerate([(tiny_server, tiny_server.address), (open_to_a_page, PAGE)]):
        headers = {"Origin": origin, "X-Forwarded-For": f"198.51.100.{number}"}
        with connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers):
            pass
    with (
        pytest.raises(InvalidStatus) as refused,
        connect_socket(f"{tiny_server.socket}/models/gpt/decode", additional_headers={"Origin": PAGE}),
    ):
        pass
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/json", "text/plain"])
def test_model_control_from_foreign_origin_returns_403(tiny_server: Server, kind: str) -> None:
    """A browser sends the first and the last without a preflight."""
    path, headers = f"{tiny_server.address}/v2/repository/models/gpt/unload", {"Content-Type": kind}
    for origin, field in (("https://evil.example", "Origin"), (tiny_server.address, "model_control")):
        answer = httpx.post(path, content=b"{}", headers=headers | {"Origin": origin}, timeout=60)
        assert (answer.status_code, field in answer.json()["error"]) == (403, True)


def statuses(server: Server, addresses: list[str]) -> list[int]:
    """Ask once from each address, as a proxy would tell it."""
    found = []
    for address in addresses:
        headers = {"X-Forwarded-For": address}
        answer = httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": [1]}, headers=headers, timeout=60)
        found.append(answer.status_code)
    return found


def test_rate_limit_uses_caller_address_of_trusted_proxy(open_to_a_page: Server) -> None:
    asked = ["203.0.113.1", "203.0.113.1", "203.0.113.2", "203.0.113.1, 203.0.113.3", "203.0.113.3"]
    assert statuses(open_to_a_page, asked) == [200, 429, 200, 200, 429]


def test_fast_path_uses_caller_address_of_trusted_proxy(open_to_a_page: Server) -> None:
    """The connection answers them, without the application."""
    ids, found = np.array([1, 2, 3]).tobytes(), []
    with httpx.Client(base_url=open_to_a_page.address, timeout=60) as client:
        for address in ("198.51.100.10", "198.51.100.11", "198.51.100.12", "198.51.100.10", "198.51.100.13"):
            headers = BYTES | {"X-Forwarded-For": address}
            found.append(client.post("/models/gpt/embed?shape=1,3", content=ids, headers=headers).status_code)
    assert found == [200, 200, 200, 429, 200]


def test_forwarded_address_is_ignored_by_default(tiny_repository: Path) -> None:
    with serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.01") as server:
        assert statuses(server, ["203.0.113.1", "203.0.113.2"]) == [200, 429]
