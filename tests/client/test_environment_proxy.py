"""Proxies of the environment: calls and streams choose the same one."""

import importlib.util
import socket

import numpy as np
import pytest

import preblock
from preblock.client import errors
from preblock.client.access import Replicas, read_access
from preblock.client.transport import SyncTransport
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import Act, FlakyProxy
from tests.support.servers import Server, free_port

NAMES = [f"{scheme}_proxy" for scheme in ("http", "https", "all", "no", "ws", "wss", "socks")]
TARGET = "http://127.0.0.1:1"


class ForwardProxy(FlakyProxy):
    """A proxy of HTTP that also opens tunnels."""

    def _carry(self, client: socket.socket, act: Act) -> None:
        if client.recv(7, socket.MSG_PEEK) == b"CONNECT":
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        super()._carry(client, act)


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["HTTP_PROXY"], True),
        (["http_proxy"], True),
        (["ALL_PROXY"], True),
        (["HTTPS_PROXY"], False),
        (["WS_PROXY"], False),
        (["HTTP_PROXY", "NO_PROXY"], False),
    ],
    ids=["upper", "lower", "all", "other scheme", "websocket", "bypassed"],
)
@pytest.mark.parametrize("scheme", ["http://", ""], ids=["url", "host"])
def test_calls_and_streams_use_the_same_proxy(
    connect: Connect, tiny_server: Server, monkeypatch: pytest.MonkeyPatch, names: list[str], used: bool, scheme: str
) -> None:
    with ForwardProxy(tiny_server.address) as proxy:
        for name in names:
            monkeypatch.setenv(name, "127.0.0.1" if name == "NO_PROXY" else proxy.address.replace("http://", scheme))
        client = connect(tiny_server.address)
        vectors = client.embed([1, 2], model="gpt").vectors
        assert proxy.connections == used
        with client.decode("gpt") as stream:
            assert np.array_equal(stream.step([1, 2]), vectors)
        assert proxy.connections == 2 * used


def test_server_without_proxy_ignores_that_of_another_port(
    tiny_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ForwardProxy(tiny_server.address) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.setenv("NO_PROXY", tiny_server.address.removeprefix("http://"))
        servers = [read_access(url, 60, None) for url in (tiny_server.address, "http://127.0.0.1")]
        drawn = (Replicas(servers) for _ in range(64))  # each begins with a random server
        transport = SyncTransport(next(replicas for replicas in drawn if replicas.current is servers[0]))
        transport.request("GET", "/v2", b"", {})
        transport.close()
        assert proxy.connections == 0


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "ALL_PROXY"])
def test_secure_address_has_the_proxy_of_https(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://other")
    monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "::1, .internal, host:8443")
    assert read_access("https://host", 1, None).proxy == "http://proxy:3128"
    for near in ("https://[::1]:8443", "https://a.internal", "https://host:8443"):
        assert read_access(near, 1, None).proxy is None
    assert read_access("http+unix://%2Frun%2Fa.sock", 1, None).proxy is None


def test_message_names_the_proxy_without_password(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{proxy}")
    client = connect(TARGET, retries=0)
    named = rf"^(cannot connect|no connection) to {TARGET} through the proxy http://{proxy} \((?!.*secret)"
    with pytest.raises(errors.ConnectionFailed, match=named):
        client.models()
    with pytest.raises(errors.ConnectionFailed, match=named), client.decode("gpt"):
        pass


@pytest.mark.parametrize(
    "proxy",
    ["foo://me:secret@x", "http://[bad", "http://x:port", "http://x:65536", "http://", "http://me:secret@x/path"],
    ids=range(6),
)
def test_malformed_proxy_is_rejected(connect: Connect, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    expected = (
        r"^proxy: got the value of HTTP_PROXY \((?!.*secret).+\), expected http://HOST:PORT or https://HOST:PORT$"
    )
    with raises_kind("Invalid", match=expected) as raised:
        connect(TARGET)
    assert raised.value.field == "proxy"
    preblock.connect("https://127.0.0.1:1").close()


@pytest.mark.skipif(importlib.util.find_spec("socksio") is not None, reason="httpx can use SOCKS")
def test_proxy_of_socks_without_its_package_is_rejected(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with raises_kind("Invalid", match=r"^proxy: got the value of ALL_PROXY \(.*socksio.*\), expected http://HOST:PORT"):
        connect(TARGET)
