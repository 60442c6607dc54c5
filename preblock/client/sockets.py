"""WebSockets of decode streams: one for asyncio, and a synchronous one. Imported with the first stream."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from typing import Any

from websockets import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.asyncio.client import unix_connect as unix_connect_async
from websockets.sync.client import ClientConnection, connect, unix_connect

from preblock.client.access import Replicas
from preblock.client.errors import ConnectionFailed, NoAnswer, ServiceError, TimedOut, invalid
from preblock.client.retry import of_response
from preblock.client.transport import async_owner

CLOSE_TIMEOUT_SECONDS = 1
"""For the close handshake: a dead peer never closes."""


class _Socket:
    """The options of a connection to a server. After a failure the next connection goes to another one."""

    owner: Callable[[], object]
    _owner: object = None
    """The owner of the connection; None before the first one."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._server = replicas, replicas.current
        server, self._timeout = self._server, self._server.timeout
        self._options: dict[str, Any] = {
            "open_timeout": server.timeout,
            "close_timeout": CLOSE_TIMEOUT_SECONDS,
            "additional_headers": {name: value for name, value in server.headers.items() if name != "User-Agent"},
            "user_agent_header": server.headers["User-Agent"],
            "max_size": None,  # the step sets the size of the answer
            "compression": None,  # vectors do not compress
        }

    def _address(self, path: str) -> dict[str, Any]:
        """Choose the server in use; return its address, certificates and proxy."""
        self._server = self._replicas.current
        uri, options = self._server.url.replace("http", "ws", 1) + path, self._options
        return {"uri": uri, "ssl": self._server.tls, "proxy": self._server.proxy, **options}

    def _check_owner(self) -> None:
        """Raise ConnectionFailed if the connection has another owner: its answers would mix with those of the owner."""
        if self._owner != self.owner():
            raise ConnectionFailed(f"the connection to {self._server.name} belongs to another process or event loop")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise every failure as an error of the client, and leave the server after one that a retry may mend."""
        try:
            with failures(self._server.route):
                yield
        except (NoAnswer, ServiceError) as error:
            if isinstance(error, NoAnswer) or error.retry_after is not None:
                self._replicas.leave(self._server)
            raise


class AsyncSocket(_Socket):
    """A connection to a server, replaced by each `connect`."""

    sleep, owner = staticmethod(asyncio.sleep), staticmethod(async_owner)
    _connection: AsyncConnection

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._stack = AsyncExitStack()

    async def connect(self, path: str) -> None:
        """Connect to `path`, and close the connection before it.

        Raises:
            ServiceError: the server refused.
            NoAnswer: no connection, or no answer in time.

        """
        address = self._address(path)
        with self._failures():
            await self.close()
            self._stack, self._owner = AsyncExitStack(), self.owner()
            uds = self._server.uds
            connection = connect_async(**address) if uds is None else unix_connect_async(uds, **address)
            self._connection = await self._stack.enter_async_context(connection)

    async def exchange(self, message: str | bytes) -> bytes:
        """Send a message, and return the answer.

        Raises:
            NoAnswer: the connection broke, or no answer came in time.

        """
        self._check_owner()
        with self._failures():
            async with asyncio.timeout(self._timeout):
                await self._connection.send(message)
            async with asyncio.timeout(self._timeout):
                return await self._connection.recv(decode=False)

    async def close(self, *error: Any) -> None:
        """Close the connection, unless another owner has it. `error` holds the arguments of `__exit__`."""
        if self._owner != self.owner():
            return
        try:
            # The close timeout of websockets begins when all bytes are written, and a dead peer reads none.
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await self._stack.__aexit__(*(error or (None, None, None)))
        except TimeoutError:
            self._connection.transport.abort()
            await self._connection.wait_closed()


class SyncSocket(_Socket):
    """A connection to a server, as `AsyncSocket`, with blocking methods."""

    sleep, owner = staticmethod(time.sleep), staticmethod(os.getpid)
    _connection: ClientConnection

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self._stack = ExitStack()

    def connect(self, path: str) -> None:
        """Connect to `path`, as `AsyncSocket.connect` does."""
        address = self._address(path)
        with self._failures():
            self.close()
            self._stack, self._owner = ExitStack(), self.owner()
            uds = self._server.uds
            connection = connect(**address) if uds is None else unix_connect(uds, **address)
            self._connection = self._stack.enter_context(connection)

    def exchange(self, message: str | bytes) -> bytes:
        """Send a message, and return the answer, as `AsyncSocket.exchange` does."""
        self._check_owner()
        with self._failures():
            self._limit(self._timeout)  # websockets sets no timeout of writes
            self._connection.send(message)
            self._limit(None)  # before version 17.3, websockets would end an idle connection
            return self._connection.recv(self._timeout, decode=False)

    def _limit(self, seconds: float | None) -> None:
        with suppress(OSError):  # the connection has ended, and its next use says why
            self._connection.socket.settimeout(seconds)

    def close(self, *error: Any) -> None:
        """Close the connection, unless another owner has it. `error` holds the arguments of `__exit__`."""
        if self._owner == self.owner():
            self._stack.__exit__(*(error or (None, None, None)))


@contextmanager
def failures(server: str) -> Iterator[None]:
    """Raise every failure of a WebSocket to the address `server` as an error of the client."""
    try:
        yield
    except InvalidStatus as error:
        response = error.response
        raise of_response(response.status_code, response.headers, response.body or b"") from error
    except TimeoutError as error:
        raise TimedOut(f"no answer in time from {server}") from error
    except ImportError as error:
        raise invalid("proxy", f"a proxy that needs a package ({error})", "one of HTTP") from error
    except ConnectionClosed as error:
        if isinstance(error.__cause__, TimeoutError):  # of a write
            raise TimedOut(f"no answer in time from {server}") from error
        raise ConnectionFailed(f"the connection to {server} was closed ({error})") from error
    except (OSError, WebSocketException) as error:
        raise ConnectionFailed(f"no connection to {server} ({type(error).__name__}: {error})") from error
