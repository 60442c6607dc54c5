"""The synchronous and the asynchronous client: methods made from `preblock/client/api.py`."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import httpx

from preblock.client import api, decode_protocol
from preblock.client.api import ApiRequest, HttpResponse
from preblock.client.decode_protocol import DecodeProtocol
from preblock.client.errors import needed
from preblock.client.retry import Outcome, pause, result_of
from preblock.client.transport import authorization, like, options, socket_address

if TYPE_CHECKING:
    from preblock.client.streams import AsyncDecodeStream, DecodeStream

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)


def _method(build: Callable[P, ApiRequest[T]]) -> Callable[Concatenate["Client", P], T]:
    """Return a method to send the request made by `build`."""

    @like(build)
    def method(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._send(build(*args, **kwargs))

    return method


def _async_method(build: Callable[P, ApiRequest[T]]) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Return a coroutine method to send the request made by `build`."""

    @like(build)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._send(build(*args, **kwargs))

    return method


def _stream_method(
    build: Callable[P, DecodeProtocol], open_stream: Callable[..., T]
) -> Callable[Concatenate["_ClientBase[Any]", P], T]:
    """Return a method to open the stream made by `build`."""

    @like(build)
    def method(self: "_ClientBase[Any]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        address = socket_address(self._http.base_url)
        return open_stream(address, build(*args, **kwargs), self._timeout, self._retries, self._headers)

    return method


def _open_stream(*args: Any) -> AbstractContextManager["DecodeStream"]:
    with needed("a decode stream", "websockets"):
        from preblock.client.streams import open_stream

    return open_stream(*args)


def _open_stream_async(*args: Any) -> AbstractAsyncContextManager["AsyncDecodeStream"]:
    with needed("a decode stream", "websockets"):
        from preblock.client.streams import open_stream_async

    return open_stream_async(*args)


class _ClientBase(Generic[H]):
    """The state of a client; `_http_class` is the class of its HTTP client."""

    _http_class: type[H]

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 3, key: str | None = None) -> None:
        self._http: H = self._http_class(**options(url, timeout, key))
        self._timeout = timeout
        self._retries = retries
        self._headers = authorization(key)


class Client(_ClientBase[httpx.Client]):
    """A synchronous client of one server. Threads may share it.

    Args:
        url: http://… or https://…, with the path prefix of the service, if any.
        timeout: seconds for connecting, and for each read and write.
        retries: most further attempts of a call, after a broken connection or while the service is too busy.
        key: API key; default none.

    Raises:
        RequestError: `url` is not an HTTP URL, or `key` cannot be sent.

    """

    _http_class = httpx.Client

    embed = _method(api.embed)
    text = _method(api.text)
    prompt_embeds = _method(api.prompt_embeds)
    bias = _method(api.bias)
    models = _method(api.models)
    model = _method(api.model)
    decode = _stream_method(decode_protocol.decode, _open_stream)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: ApiRequest[T]) -> T:
        attempt = 0
        while True:
            outcome = self._try(call)
            seconds = pause(outcome, attempt, self._retries)
            if seconds is None:
                return result_of(call, outcome)
            time.sleep(seconds)
            attempt += 1

    def _try(self, call: ApiRequest[T]) -> Outcome:
        body = bytearray()  # writable, and so are the arrays sharing its memory
        try:
            with self._http.stream(call.method, call.path, content=call.body, headers=call.headers) as response:
                for chunk in response.iter_bytes():
                    body += chunk
        except httpx.HTTPError as error:
            return error
        return HttpResponse(response.status_code, response.headers, body)


class AsyncClient(_ClientBase[httpx.AsyncClient]):
    """A client of one server, for `async with`. Takes the arguments of `Client`."""

    _http_class = httpx.AsyncClient

    embed = _async_method(api.embed)
    text = _async_method(api.text)
    prompt_embeds = _async_method(api.prompt_embeds)
    bias = _async_method(api.bias)
    models = _async_method(api.models)
    model = _async_method(api.model)
    decode = _stream_method(decode_protocol.decode, _open_stream_async)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _send(self, call: ApiRequest[T]) -> T:
        attempt = 0
        while True:
            outcome = await self._try(call)
            seconds = pause(outcome, attempt, self._retries)
            if seconds is None:
                return result_of(call, outcome)
            await asyncio.sleep(seconds)
            attempt += 1

    async def _try(self, call: ApiRequest[T]) -> Outcome:
        body = bytearray()  # writable, and so are the arrays sharing its memory
        try:
            async with self._http.stream(call.method, call.path, content=call.body, headers=call.headers) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
        except httpx.HTTPError as error:
            return error
        return HttpResponse(response.status_code, response.headers, body)
