"""The synchronous and the asynchronous client, both made from `ModelApi`."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec

from preblock.client.async_client import ModelApi
from preblock.client.async_stream import AsyncDecodeStream, DecodeStream
from preblock.client.sync_wrapper import Blocking, blocking
from preblock.client.transport import AsyncTransport, SyncTransport

P = ParamSpec("P")


def _stream_method(
    method: Callable[Concatenate[ModelApi, P], AsyncDecodeStream],
) -> Callable[Concatenate[Blocking[ModelApi], P], DecodeStream]:
    @wraps(method)
    def call(self: Blocking[ModelApi], /, *args: P.args, **kwargs: P.kwargs) -> DecodeStream:
        return DecodeStream(method(self._wrapped, *args, **kwargs))

    return call


class Client(Blocking[ModelApi], AbstractContextManager["Client"]):
    """A synchronous client of one server. Threads may share it.

    Args:
        url: http://… or https://…, with the path prefix of the service, if any.
        timeout: seconds for connecting, and for each read and write.
        retries: most further attempts of a call, after a broken connection or while the service is too busy.
        key: API key; default none.

    Raises:
        RequestError: `url` is not an HTTP URL, or `key` cannot be sent.

    """

    embed = blocking(ModelApi.embed)
    text = blocking(ModelApi.text)
    prompt_embeds = blocking(ModelApi.prompt_embeds)
    bias = blocking(ModelApi.bias)
    models = blocking(ModelApi.models)
    model = blocking(ModelApi.model)
    decode = _stream_method(ModelApi.decode)

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 3, key: str | None = None) -> None:
        transport = SyncTransport(url, timeout, key)
        super().__init__(ModelApi(transport, retries))
        self._close = transport.close

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(ModelApi, AbstractAsyncContextManager["AsyncClient"]):
    """A client of one server, for `async with`. Takes the arguments of `Client`."""

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 3, key: str | None = None) -> None:
        transport = AsyncTransport(url, timeout, key)
        super().__init__(transport, retries)
        self._close = transport.close

    async def aclose(self) -> None:
        """Close the connections."""
        await self._close()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
