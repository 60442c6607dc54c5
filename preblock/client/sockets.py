"""WebSockets of decode streams: one for asyncio, and a synchronous one. Imported with the first stream."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
from websockets import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import ClientConnection, connect

from preblock.client.errors import ConnectionFailed, TimedOut
from preblock.client.retry import of_response
from preblock.client.sync_wrapper import sleep


class _Socket:
    """The options and the open connection of a socket to the server of `http`."""

    def __init__(self, http: httpx.AsyncClient | httpx.Client) -> None:
        self._address = str(http.base_url).replace("http", "ws", 1).rstrip("/")
        self._timeout = http.timeout.read
        self._stack = AsyncExitStack()
        self._options: dict[str, Any] = {
            "open_timeout": self._timeout,
            "close_timeout": 1,  # a dead peer never closes
            "additional_headers": {name: http.headers[name] for name in ("Authorization",) if name in http.headers},
            "max_size": None,  # the step sets the size of the answer
            "compression": None,  # vectors do not compress
        }

    async def close(self, *error: Any) -> None:
        """Close the connection. `error` holds the arguments of `__exit__`."""
        await self._stack.__aexit__(*error)


class AsyncSocket(_Socket):
    """A connection to a server, replaced by each `connect`."""

    sleep = staticmethod(asyncio.sleep)
    _connection: AsyncConnection

    async def connect(self, path: str) -> None:
        """Connect to `path`, and close the connection before it.

        Raises:
            ServiceError: the server refused.
            NoAnswer: no connection, or no answer in time.

        """
        with failures():
            await self._stack.aclose()
            opening = connect_async(self._address + path, **self._options)
            self._connection = await self._stack.enter_async_context(opening)

    async def exchange(self, message: str | bytes) -> bytes:
        """Send a message, and return the answer.

        Raises:
            NoAnswer: the connection broke, or no answer came in time.

        """
        with failures():
            async with asyncio.timeout(self._timeout):
                await self._connection.send(message)
                return await self._connection.recv(decode=False)


class SyncSocket(_Socket):
    """An `AsyncSocket` whose coroutines block instead of suspending."""

    sleep = staticmethod(sleep)
    _connection: ClientConnection

    async def connect(self, path: str) -> None:
        """Connect to `path`, as `AsyncSocket.connect` does."""
        with failures():
            await self._stack.aclose()
            self._connection = self._stack.enter_context(connect(self._address + path, **self._options))

    async def exchange(self, message: str | bytes) -> bytes:
        """Send a message, and return the answer, as `AsyncSocket.exchange` does."""
        with failures():
            self._connection.send(message)
            return self._connection.recv(self._timeout, decode=False)


Socket = AsyncSocket | SyncSocket


def make_socket(http: httpx.AsyncClient | httpx.Client) -> Socket:
    """Return a WebSocket to the server of `http`, not yet connected."""
    return AsyncSocket(http) if isinstance(http, httpx.AsyncClient) else SyncSocket(http)


@contextmanager
def failures() -> Iterator[None]:
    """Raise every failure of a WebSocket as an error of the client."""
    try:
        yield
    except InvalidStatus as error:
        response = error.response
        raise of_response(response.status_code, response.headers, response.body or b"") from error
    except TimeoutError as error:
        raise TimedOut("no answer in time") from error
    except ConnectionClosed as error:
        raise ConnectionFailed(f"the connection was closed ({error})") from error
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}") from error
