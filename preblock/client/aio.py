"""The asynchronous client, for one event loop. It has the methods of the synchronous client."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from preblock.client import decode_protocol, requests
from preblock.client.decode_protocol import DecodeProtocol
from preblock.client.errors import needed
from preblock.client.requests import ApiRequest, HttpResponse
from preblock.client.retry import Outcome, pause, result_of
from preblock.client.transport import authorization, like, options, socket_address

if TYPE_CHECKING:
    from preblock.client.streams import AsyncDecodeStream

P = ParamSpec("P")
T = TypeVar("T")


def _sent(build: Callable[P, ApiRequest[T]]) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """Return a method to send the request made by `build`."""

    @like(build)
    async def method(self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._send(build(*args, **kwargs))

    return method


def _opened(
    build: Callable[P, DecodeProtocol],
) -> Callable[Concatenate["AsyncClient", P], AbstractAsyncContextManager["AsyncDecodeStream"]]:
    """Return a method to open the stream made by `build`."""

    @like(build)
    def method(
        self: "AsyncClient", /, *args: P.args, **kwargs: P.kwargs
    ) -> AbstractAsyncContextManager["AsyncDecodeStream"]:
        with needed("a decode stream", "websockets"):
            from preblock.client.streams import open_stream_async

        address = socket_address(self._http.base_url)
        return open_stream_async(address, build(*args, **kwargs), self._timeout, self._retries, self._headers)

    return method


class AsyncClient:
    """A client of one server, for `async with`. Takes the arguments of `Client`."""

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 3, key: str | None = None) -> None:
        self._http = httpx.AsyncClient(**options(url, timeout, key))
        self._timeout = timeout
        self._retries = retries
        self._headers = authorization(key)

    embed = _sent(requests.embed)
    text = _sent(requests.text)
    prompt_embeds = _sent(requests.prompt_embeds)
    bias = _sent(requests.bias)
    models = _sent(requests.models)
    model = _sent(requests.model)
    decode = _opened(decode_protocol.decode)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
