"""Decode streams, synchronous and asynchronous, over WebSocket. Imported with the first stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from websockets import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import ClientConnection, connect

from preblock.client.api import HttpResponse
from preblock.client.decode_protocol import Connect, DecodeProtocol, Effect, Effects, Exchange, Outcome
from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut
from preblock.client.results import Vectors
from preblock.client.retry import failure
from preblock.client.transport import like

P = ParamSpec("P")
T = TypeVar("T")
FAILURES = (OSError, WebSocketException)


class _StreamState:
    """The state of a decode stream."""

    def __init__(self, address: str, protocol: DecodeProtocol, timeout: float, headers: Mapping[str, str]) -> None:
        self._address, self._protocol, self._timeout = address, protocol, timeout
        self._options: dict[str, Any] = {
            "open_timeout": timeout,
            "close_timeout": 1,  # a dead peer never closes
            "additional_headers": headers,
            "max_size": None,  # the step sets the size of the answer
            "compression": None,  # vectors do not compress
        }

    @property
    def offset(self) -> list[int]:
        """Number of real tokens fed to each row; a new stream resumes there."""
        return list(self._protocol.offset)

    @property
    def companions(self) -> dict[str, Vectors]:
        """The further outputs of the last step, by name. They have the shape of its vectors except for the width."""
        return self._protocol.companions

    @property
    def version(self) -> int:
        """The version of the model."""
        assert self._protocol.version is not None
        return self._protocol.version


def _sync_method(
    build: Callable[Concatenate[DecodeProtocol, P], Effects[T]],
) -> Callable[Concatenate["DecodeStream", P], T]:
    """Return a method to carry out the effects of `build`."""

    @like(build)
    def method(self: "DecodeStream", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._carry_out(build(self._protocol, *args, **kwargs))

    return method


class DecodeStream(_StreamState):
    """A decode stream, for one thread."""

    _socket: ClientConnection

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connection = ExitStack()

    step = _sync_method(DecodeProtocol.step)
    rewind = _sync_method(DecodeProtocol.rewind)
    reorder = _sync_method(DecodeProtocol.reorder)
    append = _sync_method(DecodeProtocol.append)
    drop = _sync_method(DecodeProtocol.drop)
    ping = _sync_method(DecodeProtocol.ping)

    def _carry_out(self, effects: Effects[T]) -> T:
        outcome: Outcome = None
        while True:
            try:
                effect = effects.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                outcome = self._do(effect)
            except FAILURES as error:
                outcome = _failure(error)

    def _do(self, effect: Effect) -> Outcome:
        if isinstance(effect, Connect):
            self._connection.close()
            opening = connect(self._address + effect.path, **self._options)
            self._socket = self._connection.enter_context(opening)
        elif isinstance(effect, Exchange):
            self._socket.send(effect.message)
            return self._socket.recv(self._timeout, decode=False)
        else:
            time.sleep(effect.seconds)
        return None


def _async_method(
    build: Callable[Concatenate[DecodeProtocol, P], Effects[T]],
) -> Callable[Concatenate["AsyncDecodeStream", P], Coroutine[Any, Any, T]]:
    """Return a method to carry out the effects of `build`."""

    @like(build)
    async def method(self: "AsyncDecodeStream", /, *args: P.args, **kwargs: P.kwargs) -> T:
        # One message at a time: answers arrive in order.
        async with self._turn:
            return await self._carry_out(build(self._protocol, *args, **kwargs))

    return method


class AsyncDecodeStream(_StreamState):
    """A decode stream, for one event loop. Concurrent calls run one after another."""

    _socket: AsyncConnection

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connection = AsyncExitStack()
        self._turn = asyncio.Lock()

    step = _async_method(DecodeProtocol.step)
    rewind = _async_method(DecodeProtocol.rewind)
    reorder = _async_method(DecodeProtocol.reorder)
    append = _async_method(DecodeProtocol.append)
    drop = _async_method(DecodeProtocol.drop)
    ping = _async_method(DecodeProtocol.ping)

    async def _carry_out(self, effects: Effects[T]) -> T:
        outcome: Outcome = None
        while True:
            try:
                effect = effects.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                outcome = await self._do(effect)
            except FAILURES as error:
                outcome = _failure(error)

    async def _do(self, effect: Effect) -> Outcome:
        if isinstance(effect, Connect):
            await self._connection.aclose()
            opening = connect_async(self._address + effect.path, **self._options)
            self._socket = await self._connection.enter_async_context(opening)
        elif isinstance(effect, Exchange):
            async with asyncio.timeout(self._timeout):
                await self._socket.send(effect.message)
                return await self._socket.recv(decode=False)
        else:
            await asyncio.sleep(effect.seconds)
        return None


@contextmanager
def open_stream(
    address: str, protocol: DecodeProtocol, timeout: float, retries: int, headers: Mapping[str, str]
) -> Iterator[DecodeStream]:
    """Open a stream at the server `address`, ws://… or wss://…."""
    stream = DecodeStream(address, protocol, timeout, headers)
    with stream._connection:
        stream._carry_out(protocol.open(retries))
        yield stream


@asynccontextmanager
async def open_stream_async(
    address: str, protocol: DecodeProtocol, timeout: float, retries: int, headers: Mapping[str, str]
) -> AsyncIterator[AsyncDecodeStream]:
    """Open a stream at the server `address`, ws://… or wss://…."""
    stream = AsyncDecodeStream(address, protocol, timeout, headers)
    async with stream._connection:
        await stream._carry_out(protocol.open(retries))
        yield stream


def _failure(error: Exception) -> HttpResponse | NoAnswer:
    """Return the outcome for an exception of the connection."""
    if isinstance(error, InvalidStatus):
        response = error.response
        return HttpResponse(response.status_code, response.headers, bytearray(response.body or b""))
    if isinstance(error, TimeoutError):
        return TimedOut("no answer in time")
    if isinstance(error, ConnectionClosed):
        return ConnectionFailed(f"the connection was closed ({error})")
    return failure(error)
