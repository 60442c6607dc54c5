"""Requests of web pages: a foreign `Host` is refused on every path, and a foreign origin cannot change anything."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

from preblock.service.api.http.origins import AllowedHosts
from tests.support.connections import UPGRADE, RawConnection, http_request
from tests.support.servers import Server, serve

RAW = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}
IDS = np.array([[3]]).tobytes()
INFER = {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [3]}]}
REQUESTS = {
    "raw": ("POST", "/models/gpt/embed?shape=1,1", IDS, RAW),
    "native": ("POST", "/models/gpt/embed", b'{"input_ids": [[3]]}', JSON),
    "open-inference": ("POST", "/v2/models/gpt/infer", json.dumps(INFER).encode(), JSON),
    "openai": ("POST", "/v1/embeddings", b'{"model": "bert", "input": "a", "encoding_format": "base64"}', JSON),
    "gzip": ("POST", "/models/gpt/embed", b"no gzip", JSON | {"Content-Encoding": "gzip"}),
    "stream": ("POST", "/models/gpt/decode", b'{"input_ids": [3]}\n', {"Content-Type": "application/x-ndjson"}),
    "unload": ("POST", "/v2/repository/models/gpt/unload", b"{}", JSON),
    "models": ("GET", "/models", b"", {}),
    "health": ("GET", "/livez", b"", {}),
    "open-inference-health": ("GET", "/v2/health/ready", b"", {}),
    "page": ("GET", "/inspect", b"", {}),
    "preflight": ("OPTIONS", "/models", b"", {"Origin": "http://evil.example", "Access-Control-Request-Method": "GET"}),
    "unknown": ("GET", "/nowhere", b"", {}),
    "websocket": ("GET", "/models/gpt/decode", b"", UPGRADE | {"Origin": "http://evil.example"}),
}
"""A request for each code path, by name."""


@pytest.fixture(scope="module")
def open_server(tiny_repository: Path) -> Iterator[Server]:
    """A server that pages of any origin may use, under the names of its loopback address alone."""
    with serve(tiny_repository, PREBLOCK_CORS_ORIGINS="*") as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_foreign_host_is_refused_on_every_path(open_server: Server, name: str) -> None:
    method, path, body, headers = REQUESTS[name]
    good = http_request("/models/gpt/embed?shape=1,1", IDS, RAW)
    with RawConnection(open_server.address) as stream:
        assert [stream.ask(good)[0] for _ in range(2)] == [200, 200]  # the second by the known head
        for host in ("127.0.0.1.evil.example:80", "evil.example")[name == "websocket" :]:
            status, head, document = stream.ask(http_request(path, body, headers | {"Host": host}, method))
            assert (status, f"got {host}, expected localhost".encode() in document) == (421, True)
            assert b"allowed_hosts" in document
            assert "x-request-id" in head.lower()
        if name != "websocket":
            assert stream.ask(good)[0] == 200


def test_foreign_host_is_refused_before_its_body_arrives(open_server: Server) -> None:
    with RawConnection(open_server.address) as stream:
        request = http_request("/models/gpt/embed?shape=1,1", IDS, RAW)
        assert stream.ask(request)[0] == 200
        assert stream.ask(request.replace(b"localhost", b"evil.example").removesuffix(IDS))[0] == 421


NAMED = "--allowed-hosts", "models.example,192.0.2.1"


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (NAMED, ("localhost:1", "[::1]", "Models.Example:443", "192.0.2.1:80"), ("other.example", "192.0.2.2")),
        (("--host", "0.0.0.0"), ("localhost", "other.example", "192.0.2.2"), ()),
        (("--host", "0.0.0.0", *NAMED), ("localhost", "models.example"), ("other.example", "0.0.0.0")),
        (("--workers", "2"), ("localhost",), ("other.example",)),
    ],
)
def test_listener_and_setting_decide_on_the_host(
    tiny_repository: Path, options: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    with serve(tiny_repository, *options) as server:
        path = f"{server.address.replace('0.0.0.0', '127.0.0.1')}/models"
        for hosts, status in ((allowed, 200), (refused, 421)):
            for host in hosts:
                assert httpx.get(path, headers={"Host": host}, timeout=60).status_code == status, host


def test_allowed_hosts_are_loopback_and_named_hosts() -> None:
    hosts = AllowedHosts(["Here.example", "fd00:0::1"])
    for host in (
        *("localhost", "LocalHost.:80", "a.localhost:8000", "127.0.0.1", "127.255.1.2:", "[::1]"),
        *("[0:0:0:0:0:0:0:1]:80", "[::ffff:127.0.0.1]", "here.example", "[FD00::1]:2"),
    ):
        assert hosts.allow(host.encode()), host
    for host in (
        *("", "0.0.0.0", "[::]", "10.0.0.1", "::1", "127.0.0.1.nip.io", "localhost.example", "notlocalhost"),
        *("x@localhost", "localhost@x", "[::1", "::1]", "a" * 5000 + ".localhost", "2130706433", "127.1"),
        *("0x7f.1", "sub.here.example", "here.example:80:80", "\xff"),
    ):
        assert not hosts.allow(host.encode("latin-1")), host


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]
OWN = [{}, {"Origin": "http://localhost"}, {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}]


@pytest.mark.parametrize("name", ["raw", "native", "openai", "gzip", "stream", "unload"])
def test_post_of_foreign_page_is_forbidden(tiny_server: Server, name: str) -> None:
    """A browser sends a form without a preflight, so the type of the body changes nothing."""
    method, path, body, headers = REQUESTS[name]
    with RawConnection(tiny_server.address) as stream:
        for origin in FOREIGN:
            answer = stream.ask(http_request(path, body, headers | origin, method))
            assert (answer[0], b"Origin: got " in answer[2]) == (403, True), origin


def test_post_of_own_page_is_answered(tiny_server: Server) -> None:
    method, path, body, headers = REQUESTS["native"]
    with RawConnection(tiny_server.address) as stream:
        for origin in OWN:
            assert stream.ask(http_request(path, body, headers | origin, method))[0] == 200, origin


def test_websocket_of_foreign_site_is_forbidden(tiny_server: Server) -> None:
    for headers in ({"Origin": tiny_server.address, "Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        address = f"{tiny_server.socket}/models/gpt/decode"
        with pytest.raises(InvalidStatus) as refused, connect_socket(address, additional_headers=headers):
            pass
        assert refused.value.response.status_code == 403
