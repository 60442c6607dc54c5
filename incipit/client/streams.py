"""The connections of a decode stream, one that waits and one that awaits. Imported with the first stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

from websockets import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import ClientConnection, connect

from incipit.client.calls import Row
from incipit.client.errors import IncipitError, StreamClosed, of_problem
from incipit.client.results import Vectors
from incipit.client.retry import failure
from incipit.client.sequence import Sequence

NOT_OPENED = (OSError, WebSocketException)
NOT_ANSWERED = (ConnectionClosed, TimeoutError)


class DecodeStream:
    """One sequence that is fed step by step; for one thread."""

    def __init__(self, socket: ClientConnection, sequence: Sequence, timeout: float) -> None:
        self._socket = socket
        self._sequence = sequence
        self._timeout = timeout

    @property
    def offset(self) -> int:
        """How many real tokens were fed: where a new stream would resume."""
        return self._sequence.offset

    def step(self, ids: Row) -> Vectors:
        """Return the vectors (1, L, D) of the next tokens, and advance the offset. A step is never sent twice.

        Raises:
            ServiceError: the step was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer; the stream is over.

        """
        frame = self._sequence.ask(ids)
        try:
            self._socket.send(frame)
            answer = self._socket.recv(self._timeout, decode=False)
        except NOT_ANSWERED as error:
            raise _closed(error, self.offset) from error
        return self._sequence.answer(answer)


class AsyncDecodeStream:
    """One sequence that is fed step by step, one step at a time."""

    def __init__(self, socket: AsyncConnection, sequence: Sequence, timeout: float) -> None:
        self._socket = socket
        self._sequence = sequence
        self._timeout = timeout

    @property
    def offset(self) -> int:
        """How many real tokens were fed: where a new stream would resume."""
        return self._sequence.offset

    async def step(self, ids: Row) -> Vectors:
        """Return the vectors (1, L, D) of the next tokens, and advance the offset. A step is never sent twice.

        Raises:
            ServiceError: the step was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer; the stream is over.

        """
        frame = self._sequence.ask(ids)
        try:
            async with asyncio.timeout(self._timeout):
                await self._socket.send(frame)
                answer = await self._socket.recv(decode=False)
        except NOT_ANSWERED as error:
            raise _closed(error, self.offset) from error
        return self._sequence.answer(answer)


@contextmanager
def open_stream(address: str, offset: int, timeout: float) -> Iterator[DecodeStream]:
    """Open a stream at `address`, ws://… or wss://…, that states `offset` too."""
    with ExitStack() as stack:
        try:
            socket = stack.enter_context(connect(address, **_options(timeout)))
        except NOT_OPENED as error:
            raise _refusal(error) from error
        yield DecodeStream(socket, Sequence(offset), timeout)


@asynccontextmanager
async def open_stream_async(address: str, offset: int, timeout: float) -> AsyncIterator[AsyncDecodeStream]:
    """Open a stream at `address`, ws://… or wss://…, that states `offset` too."""
    async with AsyncExitStack() as stack:
        try:
            socket = await stack.enter_async_context(connect_async(address, **_options(timeout)))
        except NOT_OPENED as error:
            raise _refusal(error) from error
        yield AsyncDecodeStream(socket, Sequence(offset), timeout)


def _options(timeout: float) -> dict[str, Any]:
    # A frame is as large as its step asked for, and vectors do not compress. A peer that is gone closes nothing.
    return {"open_timeout": timeout, "close_timeout": 1, "max_size": None, "compression": None}


def _refusal(error: Exception) -> IncipitError:
    """Return why no stream was opened."""
    if isinstance(error, InvalidStatus):
        return of_problem(error.response.status_code, error.response.body or b"")
    return failure(error)


def _closed(error: Exception, offset: int) -> StreamClosed:
    reason = "no answer in time" if isinstance(error, TimeoutError) else f"the connection was closed ({error})"
    return StreamClosed(reason, offset)
