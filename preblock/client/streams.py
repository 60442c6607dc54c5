"""The connections of a decode stream, one that waits and one that awaits. Imported with the first stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from websockets import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import ClientConnection, connect

from preblock.client.decoding import Connect, Decoding, Effect, Effects, Exchange, Outcome
from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut
from preblock.client.requests import Reply
from preblock.client.results import Vectors
from preblock.client.retry import failure
from preblock.client.transport import like

P = ParamSpec("P")
T = TypeVar("T")
FAILURES = (OSError, WebSocketException)


class _Rows:
    """What both streams say of themselves."""

    _decoding: Decoding

    @property
    def offset(self) -> list[int]:
        """How many real tokens were fed to each row: where a new stream would resume."""
        return list(self._decoding.offset)

    @property
    def companions(self) -> dict[str, Vectors]:
        """The further outputs of the last step, by name, of the shape of its vectors but for the width."""
        return self._decoding.companions

    @property
    def version(self) -> int:
        """The version of the model that answers."""
        assert self._decoding.version is not None
        return self._decoding.version


def _told(build: Callable[Concatenate[Decoding, P], Effects[T]]) -> Callable[Concatenate["DecodeStream", P], T]:
    """Return the method that carries out the effects of `build`."""

    @like(build)
    def method(self: "DecodeStream", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._carry_out(build(self._decoding, *args, **kwargs))

    return method


class DecodeStream(_Rows):
    """Rows that are fed step by step; for one thread."""

    def __init__(self, address: str, decoding: Decoding, timeout: float, headers: Mapping[str, str]) -> None:
        self._address, self._decoding = address, decoding
        self._timeout, self._headers = timeout, headers
        self._connection = ExitStack()
        self._socket: ClientConnection

    step = _told(Decoding.step)
    rewind = _told(Decoding.rewind)
    reorder = _told(Decoding.reorder)
    append = _told(Decoding.append)
    drop = _told(Decoding.drop)
    ping = _told(Decoding.ping)

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
            opening = connect(self._address + effect.path, **_options(self._timeout, self._headers))
            self._socket = self._connection.enter_context(opening)
        elif isinstance(effect, Exchange):
            self._socket.send(effect.message)
            return self._socket.recv(self._timeout, decode=False)
        else:
            time.sleep(effect.seconds)
        return None


def _awaited(
    build: Callable[Concatenate[Decoding, P], Effects[T]],
) -> Callable[Concatenate["AsyncDecodeStream", P], Coroutine[Any, Any, T]]:
    """Return the method that carries out the effects of `build`."""

    @like(build)
    async def method(self: "AsyncDecodeStream", /, *args: P.args, **kwargs: P.kwargs) -> T:
        # One message at a time: the others wait for its answer.
        async with self._turn:
            return await self._carry_out(build(self._decoding, *args, **kwargs))

    return method


class AsyncDecodeStream(_Rows):
    """Rows that are fed step by step, one step at a time."""

    def __init__(self, address: str, decoding: Decoding, timeout: float, headers: Mapping[str, str]) -> None:
        self._address, self._decoding = address, decoding
        self._timeout, self._headers = timeout, headers
        self._connection = AsyncExitStack()
        self._socket: AsyncConnection
        self._turn = asyncio.Lock()

    step = _awaited(Decoding.step)
    rewind = _awaited(Decoding.rewind)
    reorder = _awaited(Decoding.reorder)
    append = _awaited(Decoding.append)
    drop = _awaited(Decoding.drop)
    ping = _awaited(Decoding.ping)

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
            opening = connect_async(self._address + effect.path, **_options(self._timeout, self._headers))
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
    address: str, decoding: Decoding, timeout: float, retries: int, headers: Mapping[str, str]
) -> Iterator[DecodeStream]:
    """Open a stream at the server `address`, ws://… or wss://…."""
    stream = DecodeStream(address, decoding, timeout, headers)
    with stream._connection:
        stream._carry_out(decoding.open(retries))
        yield stream


@asynccontextmanager
async def open_stream_async(
    address: str, decoding: Decoding, timeout: float, retries: int, headers: Mapping[str, str]
) -> AsyncIterator[AsyncDecodeStream]:
    """Open a stream at the server `address`, ws://… or wss://…."""
    stream = AsyncDecodeStream(address, decoding, timeout, headers)
    async with stream._connection:
        await stream._carry_out(decoding.open(retries))
        yield stream


def _options(timeout: float, headers: Mapping[str, str]) -> dict[str, Any]:
    # A frame is as large as its step asked for, and vectors do not compress. A peer that is gone closes nothing.
    sizes = {"max_size": None, "compression": None}
    return {"open_timeout": timeout, "close_timeout": 1, "additional_headers": headers, **sizes}


def _failure(error: Exception) -> Reply | NoAnswer:
    """Return what came instead of an answer."""
    if isinstance(error, InvalidStatus):
        response = error.response
        return Reply(response.status_code, response.headers, bytearray(response.body or b""))
    if isinstance(error, TimeoutError):
        return TimedOut("no answer in time")
    if isinstance(error, ConnectionClosed):
        return ConnectionFailed(f"the connection was closed ({error})")
    return failure(error)
