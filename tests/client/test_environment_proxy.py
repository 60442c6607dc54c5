"""Proxies of the environment: calls and streams choose the same one."""

import socket
from importlib.util import find_spec
from typing import Any

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
def test_calls_and_streams_use_the_same_proxy(
    connect: Connect, exchange: Any, tiny_server: Server, monkeypatch: pytest.MonkeyPatch, names: list[str], used: bool
) -> None:
    with ForwardProxy(tiny_server.address) as proxy:
        for scheme in ("http://", ""):
            for name in names:
                value = "127.0.0.1" if name == "NO_PROXY" else proxy.address.replace("http://", scheme)
                monkeypatch.setenv(name, value)
            exchange(connect(tiny_server.address))
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


def test_message_names_the_proxy_without_password(
    connect: Connect, exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{proxy}")
    named = rf"^(cannot connect|no connection) to {TARGET} through the proxy http://{proxy} \((?!.*secret)"
    with pytest.raises(errors.ConnectionFailed, match=named):
        exchange(connect(TARGET, retries=0))


def test_malformed_proxy_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (
        r"^proxy: got the value of HTTP_PROXY \((?!.*secret).+\), expected http://HOST:PORT or https://HOST:PORT$"
    )
    places = "http://[bad", "http://x:port", "http://x:65536", "http://"
    socks = () if find_spec("socksio") else ("socks5://me:secret@127.0.0.1",)  # httpx can use it with this package
    for proxy in (*places, *socks, "foo://me:secret@x", "http://me:secret@x/path"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with raises_kind("Invalid", match=expected) as raised:
            preblock.connect(TARGET)
        assert raised.value.field == "proxy"
    preblock.connect("https://127.0.0.1:1").close()
