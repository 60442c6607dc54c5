"""The addresses of a service, and everything a connection to it needs: key, timeout, certificates."""

import os
import random
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from preblock import __version__
from preblock.client.errors import invalid

MAX_PORT = 2**16 - 1
FilePath = str | os.PathLike[str]
Verify = bool | FilePath | ssl.SSLContext
Certificate = FilePath | tuple[FilePath, FilePath] | tuple[FilePath, FilePath, str]


@dataclass(frozen=True)
class ServerAccess:
    """A server, and how to connect to it.

    Args:
        url: http://… or https://…, with the path prefix of the service, if any; no slash at the end.
        uds: path of the Unix socket to connect to; None for TCP.
        timeout: seconds for connecting, and for each read and write.
        headers: sent with each request and handshake.
        tls: certificates of https://…; None for http://….
        proxy: URL of the proxy for calls and streams; None to connect without one.

    """

    url: str
    uds: str | None
    timeout: float
    headers: dict[str, str]
    tls: ssl.SSLContext | None
    proxy: str | None

    @property
    def name(self) -> str:
        """The address for messages, without a password."""
        if self.uds is not None:
            return self.uds
        return _without_password(self.url)

    @property
    def route(self) -> str:
        """The address for messages, and the proxy before it, if any."""
        return self.name if self.proxy is None else f"{self.name} through the proxy {_without_password(self.proxy)}"


class Replicas:
    """The servers of one service, and the one in use. A client stays with it until it fails.

    Args:
        servers: at least one; a random one is used first, so that many clients spread over all.

    """

    def __init__(self, servers: Sequence[ServerAccess]) -> None:
        self._servers = tuple(servers)
        self._place = random.randrange(len(self._servers))

    @property
    def all(self) -> tuple[ServerAccess, ...]:
        """Every server."""
        return self._servers

    @property
    def current(self) -> ServerAccess:
        """The server in use."""
        return self._servers[self._place]

    @property
    def has_others(self) -> bool:
        """Whether another server can be used."""
        return len(self._servers) > 1

    def leave(self, server: ServerAccess) -> None:
        """Use the next server, unless another call has left `server` before."""
        if server is self.current:
            self._place = (self._place + 1) % len(self._servers)


def read_replicas(
    urls: str | Sequence[str], timeout: float, key: str | None, verify: Verify = True, cert: Certificate | None = None
) -> Replicas:
    """Return the access to all servers at `urls`; the arguments are those of `Client`.

    Raises:
        RequestError: there is no URL, some have http:// and some https://, one of several is a Unix socket, or as for
            `read_access`.

    """
    several = hasattr(urls, "__iter__") and not isinstance(urls, str | bytes)
    given: list[Any] = list(urls) if several else [urls]
    if not given:
        raise invalid("url", "no address", "one address or more")
    servers = [read_access(url, timeout, key, verify, cert) for url in given]
    if len(servers) > 1 and any(server.uds is not None for server in servers):
        raise invalid("url", "several addresses, one with http+unix://", "one address, or several of TCP")
    if len({server.tls is None for server in servers}) > 1:
        raise invalid("url", "addresses with http:// and with https://", "one of both for all")
    return Replicas(servers)


def read_access(
    url: Any, timeout: Any, key: str | None, verify: Verify = True, cert: Certificate | None = None
) -> ServerAccess:
    """Return the access to the server at `url`; the arguments are those of `Client`.

    Raises:
        RequestError: `url` is not an HTTP URL, `timeout` is no positive number, `key` cannot be sent, a certificate
            cannot be read, or the environment names a proxy that cannot be used.

    """
    if not isinstance(url, str):
        raise invalid("url", repr(url), "http://… or https://…")
    url, uds = split_uds(url)
    try:
        address = httpx.URL(url)
        address.raw_host.decode().encode("idna")  # as sockets do: a label has 1 to 63 characters
    except (httpx.InvalidURL, UnicodeError) as error:
        raise invalid("url", url, f"http://… or https://… ({error})") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise invalid("url", url or "nothing", "http://… or https://…")
    if (address.port or 0) > MAX_PORT:
        raise invalid("url", url, f"a port of at most {MAX_PORT}")
    if "?" in url or "#" in url:
        raise invalid("url", url, "an address without query and fragment")
    if timeout is not None:
        seconds = 0.0
        if isinstance(timeout, Real):
            with suppress(OverflowError):
                seconds = float(timeout)
        if not 0 < seconds <= TIMEOUT_MAX:
            raise invalid("timeout", repr(timeout), f"seconds, more than 0 and at most {TIMEOUT_MAX:g}")
        timeout = seconds
    if key == "":
        raise invalid("key", "an empty text", "a key, or None to send none")
    if key is not None and not (key.isascii() and key.isprintable()):
        message = "key: a header cannot carry its characters; a key has printable characters of ASCII alone"
        raise invalid("key", "other characters", "printable characters of ASCII", message)
    headers = {"User-Agent": f"preblock/{__version__}", **authorization(key)}
    tls = read_certificates(verify, cert) if address.scheme == "https" else None
    proxy = read_proxy(address) if uds is None else None
    return ServerAccess(str(address).rstrip("/"), uds, timeout, headers, tls, proxy)


def read_proxy(address: httpx.URL) -> str | None:
    """Return the proxy that the environment names for `address`, such as in HTTP_PROXY for http://…, or None.

    Raises:
        RequestError: it is no URL of a proxy, or needs a package.

    """
    if proxy_bypass(address.host) or proxy_bypass(address.netloc.decode()):
        return None
    proxies = getproxies()
    name = next((name for name in (address.scheme, "all") if proxies.get(name)), None)
    if name is None:
        return None
    proxy = proxies[name] if "://" in proxies[name] else f"http://{proxies[name]}"
    reason: object = "no host, or a path"
    try:
        parts = urlsplit(proxy)
        httpx.HTTPTransport(verify=False, proxy=proxy)
        if parts.hostname and parts.path in ("", "/") and parts.port != 0:  # to read a malformed port raises ValueError
            return proxy
    except (httpx.InvalidURL, ImportError, ValueError) as error:
        reason = error
    raise invalid("proxy", f"the value of {name.upper()}_PROXY ({reason})", "http://HOST:PORT or https://HOST:PORT")


def _without_password(url: str) -> str:
    return str(httpx.URL(url).copy_with(userinfo=b""))


def split_uds(url: str) -> tuple[str, str | None]:
    """Return a URL for HTTP, and the path of the Unix socket in `url`; None for TCP.

    Raises:
        RequestError: the path is not percent-encoded, or not absolute.

    """
    scheme, is_unix, rest = url.partition("+unix://")
    if not is_unix:
        return url, None
    socket, slash, prefix = rest.partition("/")
    path = unquote(socket)
    if not path.startswith("/"):
        raise invalid("url", url, "an absolute path with %2F for each /, such as http+unix://%2Frun%2Fpreblock.sock")
    return f"{scheme}://localhost{slash}{prefix}", path


def authorization(key: str | None) -> dict[str, str]:
    """Return the Authorization header of `key`; empty without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def read_certificates(verify: Verify, cert: Certificate | None) -> ssl.SSLContext:
    """Return the TLS context with the trusted certificates `verify` and the client's own certificate `cert`.

    Raises:
        RequestError: a file is missing, or does not hold certificates in PEM.

    """
    try:
        if isinstance(verify, bool | ssl.SSLContext):
            context = httpx.create_ssl_context(verify)
        elif Path(verify).is_dir():
            context = ssl.create_default_context(capath=verify)
        else:
            context = ssl.create_default_context(cafile=verify)
    except OSError as error:  # of ssl, too
        raise invalid("verify", f"{verify} ({error.strerror or error})", "a file or folder of certificates") from error
    try:
        if isinstance(cert, tuple):
            context.load_cert_chain(*cert)
        elif cert is not None:
            context.load_cert_chain(cert)
    except OSError as error:
        files = cert if isinstance(cert, str | os.PathLike) else ", ".join(map(str, cert or ()))
        expected = "a file with certificate and key, or the files of both"
        raise invalid("cert", f"{files} ({error.strerror or error})", expected) from error
    return context
