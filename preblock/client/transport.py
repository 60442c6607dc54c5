"""HTTP of the clients: a transport for asyncio, and a synchronous one without suspension."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from preblock import __version__
from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut, invalid
from preblock.client.retry import of_response
from preblock.client.sync_wrapper import sleep


class AsyncTransport:
    """The connections of an `AsyncClient`, which documents the arguments."""

    sleep = staticmethod(asyncio.sleep)

    def __init__(self, url: str, timeout: float, key: str | None) -> None:
        self.http = httpx.AsyncClient(**options(url, timeout, key))
        self.close = self.http.aclose

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytearray:
        """Return the body of a response with status 200.

        Raises:
            ServiceError: the response has another status.
            NoAnswer: no answer came.

        """
        content = bytearray()  # writable, and so are the arrays sharing its memory
        try:
            async with self.http.stream(method, path, content=body, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
        except httpx.HTTPError as error:
            raise _failure(error) from error
        return _checked(response, content)


class SyncTransport:
    """The connections of a `Client`, which documents the arguments. Its coroutines block instead of suspending."""

    sleep = staticmethod(sleep)

    def __init__(self, url: str, timeout: float, key: str | None) -> None:
        self.http = httpx.Client(**options(url, timeout, key))
        self.close = self.http.close

    async def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytearray:
        """Return the body of a response, as `AsyncTransport.request` does."""
        content = bytearray()
        try:
            with self.http.stream(method, path, content=body, headers=headers) as response:
                for chunk in response.iter_bytes():
                    content += chunk
        except httpx.HTTPError as error:
            raise _failure(error) from error
        return _checked(response, content)


def _checked(response: httpx.Response, content: bytearray) -> bytearray:
    """Return `content`, or raise the error in it."""
    if response.status_code != 200:
        raise of_response(response.status_code, response.headers, content)
    return content


def _failure(error: httpx.HTTPError) -> NoAnswer:
    """Return the client's error for an exchange without an answer."""
    kind = TimedOut if isinstance(error, httpx.TimeoutException) else ConnectionFailed
    failure = kind(f"{type(error).__name__}: {error}")
    # A retry helps only if the connection failed, or ended before the answer did.
    if not isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        failure.retry_after = None
    return failure


def options(url: str, timeout: float, key: str | None) -> dict[str, Any]:
    """Return the options of an httpx client.

    Raises:
        RequestError: `url` is not an HTTP URL, or `key` cannot be sent.

    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise invalid("url", url, f"http://… or https://… ({error})") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise invalid("url", url, "http://… or https://…")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise invalid("key", "other characters", "printable characters of ASCII")
    return {
        "base_url": address,
        # No limit on the wait for a free connection of the pool: the requests before it have their own.
        "timeout": httpx.Timeout(timeout, pool=None),
        "headers": {"User-Agent": f"preblock/{__version__}", "Accept-Encoding": "identity", **authorization(key)},
    }


def authorization(key: str | None) -> dict[str, str]:
    """Return the Authorization header of `key`; empty without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def model_path(model: str, version: int | None, *action: str) -> str:
    """Return the path of a model, or of an action such as "decode"."""
    versions = () if version is None else ("versions", str(version))
    return "/".join(("", "models", quote(model, safe=""), *versions, *action))
