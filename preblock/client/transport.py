"""HTTP of the clients: a transport for asyncio, and a synchronous one."""

import asyncio
import os
import ssl
import time
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from preblock.client.access import Replicas, ServerAccess
from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut, invalid
from preblock.client.retry import of_response

AsyncOwner = tuple[int, AbstractEventLoop]
"""Owner of connections: after a fork two processes share each socket, and a second event loop cannot use it."""


def async_owner() -> AsyncOwner:
    """Return the running process and event loop: they alone may use a connection opened now."""
    return os.getpid(), asyncio.get_running_loop()


class _Exchange:
    """The options of a request, and its outcome. After a failure, the next request goes to another server."""

    _lent: httpx.AsyncClient | httpx.Client | None
    """The httpx client of the caller."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, server = replicas, replicas.current
        # No limit on the wait for a free connection of the pool: the requests before it have their own.
        self._timeout = httpx.Timeout(server.timeout, pool=None)
        self._headers = {"Accept-Encoding": "identity", **server.headers}
        # On http:// nothing is verified, and to read the certificates of the system takes 20 ms.
        self._verify = server.tls or False
        self._uds = server.uds
        # Also the servers without a proxy: in httpx an address without a port matches all ports.
        self._proxies = {server.url: server.proxy for server in replicas.all if server.uds is None}
        self._process, self._closed = os.getpid(), False

    def _check_usable(self) -> None:
        """Raise RequestError if the client was closed, or the caller's httpx client belongs to another process."""
        if self._closed or (self._lent is not None and self._lent.is_closed):
            raise invalid("client", "a closed client", "an open one")
        if self._lent is not None and os.getpid() != self._process:
            raise invalid("http_client", "the httpx client of another process", "a new client after a fork")

    def _request(
        self, server: ServerAccess, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the arguments of httpx for a request."""
        return {
            "method": method,
            "url": server.url + path,
            "content": body,
            "headers": self._headers | dict(headers),
            "timeout": self._timeout,
        }

    def _failure(self, server: ServerAccess, error: httpx.HTTPError | ssl.SSLError) -> NoAnswer:
        """Return the client's error for an exchange without an answer, and leave the server."""
        self._replicas.leave(server)
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        route = server.route if self._lent is None else server.name
        failure: NoAnswer
        if isinstance(error, httpx.TimeoutException):
            failure = TimedOut(f"no answer from {route} within {server.timeout:g} s ({cause})")
        elif isinstance(error, httpx.ConnectError):
            failure = ConnectionFailed(f"cannot connect to {route} ({cause})")
        else:
            failure = ConnectionFailed(f"no complete answer from {route} ({cause})")
        # A retry helps only if the connection failed, or ended before the answer did. Another server may be reachable.
        helped = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        if not helped and not (self._replicas.has_others and isinstance(error, httpx.ConnectTimeout)):
            failure.retry_after = None
        return failure

    def _checked(self, server: ServerAccess, response: httpx.Response, content: bytearray) -> bytearray:
        """Return `content`, or raise the error in it; after an error that a retry may mend, leave the server."""
        if response.status_code == 200:
            return content
        error = of_response(response.status_code, response.headers, content)
        if error.retry_after is not None:
            self._replicas.leave(server)
        raise error


class AsyncTransport(_Exchange):
    """The connections of an `AsyncClient`, which documents the arguments."""

    sleep = staticmethod(asyncio.sleep)

    def __init__(self, replicas: Replicas, http_client: httpx.AsyncClient | None = None) -> None:
        super().__init__(replicas)
        self._lent: httpx.AsyncClient | None = http_client
        self._pools: dict[AsyncOwner, httpx.AsyncClient] = {}

    def _pool(self) -> httpx.AsyncClient:
        """Return the httpx client of the caller, or of the running process and event loop."""
        self._check_usable()
        if self._lent is not None:
            return self._lent
        owner = async_owner()
        if owner not in self._pools:
            for other in list(self._pools):
                if other[1].is_closed():
                    self._pools.pop(other, None)
            # With these transports, httpx does not choose proxies itself.
            mounts = {url: httpx.AsyncHTTPTransport(self._verify, proxy=proxy) for url, proxy in self._proxies.items()}
            direct = httpx.AsyncHTTPTransport(self._verify, uds=self._uds)
            self._pools[owner] = httpx.AsyncClient(transport=direct, mounts=mounts)
        return self._pools[owner]

    async def aclose(self) -> None:
        """Close the connections, except those of the caller's own httpx client and of other owners."""
        self._closed = True
        if pool := self._pools.get(async_owner()):
            await pool.aclose()

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytearray:
        """Return the body of a response with status 200.

        Raises:
            ServiceError: the response has another status.
            NoAnswer: no answer came.

        """
        pool, server = self._pool(), self._replicas.current
        content = bytearray()  # writable, and so are the arrays sharing its memory
        try:
            async with pool.stream(**self._request(server, method, path, body, headers)) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
        except (httpx.HTTPError, ssl.SSLError) as error:  # httpcore passes the alert of a refused handshake on
            raise self._failure(server, error) from error
        return self._checked(server, response, content)


class SyncTransport(_Exchange):
    """The connections of a `Client`, which documents the arguments."""

    sleep = staticmethod(time.sleep)

    def __init__(self, replicas: Replicas, http_client: httpx.Client | None = None) -> None:
        super().__init__(replicas)
        self._lent: httpx.Client | None = http_client
        self._pools: dict[int, httpx.Client] = {}

    def _pool(self) -> httpx.Client:
        """Return the httpx client of the caller, or of the running process."""
        self._check_usable()
        if self._lent is not None:
            return self._lent
        owner = os.getpid()
        if owner not in self._pools:
            mounts = {url: httpx.HTTPTransport(self._verify, proxy=proxy) for url, proxy in self._proxies.items()}
            direct = httpx.HTTPTransport(self._verify, uds=self._uds)
            # Two threads may begin at once, and share one pool then.
            self._pools.setdefault(owner, httpx.Client(transport=direct, mounts=mounts))
        return self._pools[owner]

    def close(self) -> None:
        """Close the connections, except those of the caller's own httpx client and of other owners."""
        self._closed = True
        if pool := self._pools.get(os.getpid()):
            pool.close()

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytearray:
        """Return the body of a response, as `AsyncTransport.request` does."""
        pool, server, content = self._pool(), self._replicas.current, bytearray()
        try:
            with pool.stream(**self._request(server, method, path, body, headers)) as response:
                for chunk in response.iter_bytes():
                    content += chunk
        except (httpx.HTTPError, ssl.SSLError) as error:  # httpcore passes the alert of a refused handshake on
            raise self._failure(server, error) from error
        return self._checked(server, response, content)


def quote_model(model: Any) -> str:
    """Return the name of a model for a path; raise RequestError if it cannot be one segment."""
    if not isinstance(model, str) or model in ("", ".", "..") or "/" in model:
        raise invalid("model", repr(model), "the name of a model, without '/'")
    return quote(model, safe="")


def model_path(model: Any, version: int | None, *action: str) -> str:
    """Return the path of a model, or of an action such as "decode"; raise RequestError as `quote_model` does."""
    versions = () if version is None else ("versions", str(version))
    return "/".join(("", "models", quote_model(model), *versions, *action))
