"""Messages of gRPC calls: connections with large messages take turns, so that other clients are served between them.

gRPC's library copies a whole message in the event loop, 16 MiB in some 6 ms, and nothing can interrupt it. But it
receives the message only when the service reads it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter, process_time

import grpc

from preblock.service.core.errors import Unavailable
from preblock.service.core.large_bodies import LARGE_BODY_BYTES
from preblock.service.core.settings import LiveSettings

MAX_TURN_SECONDS = 0.1
MAX_STREAM_TURN_SECONDS = 0.02
"""Shorter, because the client of a stream may send its next message any time later."""
MAX_CONNECTIONS = 2**12
"""Most known connections with large messages; the connection with the oldest message is forgotten first."""


async def receive_message(call: grpc.aio.ServicerContext) -> bytes | None:
    """Return the next message of a call, or None after its last one."""
    try:
        message: bytes = await call.read()
    except grpc.aio.BaseError:  # the server has stopped
        raise asyncio.CancelledError from None
    return None if message is grpc.aio.EOF else message


class MessageReader:
    """Reads messages. A unary call waits for a turn if the last message of its connection was large.

    A stream waits for one if its own last message was large. Connections take turns, one unary call of each at a time.
    A turn ends with its message, and at the latest after `turn_seconds`: then the next call reads beside the slow one.
    After a turn there is a pause as long as the CPU time of this process in the turn.

    Args:
        settings: longest wait for a turn.
        turn_seconds: longest turn of a unary call; default `MAX_TURN_SECONDS`.

    """

    def __init__(self, settings: LiveSettings, turn_seconds: float = MAX_TURN_SECONDS) -> None:
        self._settings, self._turn_seconds = settings, turn_seconds
        self._large: dict[str, asyncio.Lock] = {}  # for each connection, the place of its next call; oldest first
        self._turn = asyncio.Lock()

    async def read(self, call: grpc.aio.ServicerContext) -> bytes | None:
        """Return the message of a unary call, or None if it has none.

        Raises:
            Unavailable: the call has waited for a turn longer than the queue timeout.

        """
        connection = call.peer()
        place = await self._wait(connection) if connection in self._large else None
        if place is None:
            message = await receive_message(call)
        else:
            async with self._take_turn(self._turn_seconds, place):
                message = await receive_message(call)
        if message is not None:
            self._remember(connection, len(message))
        return message

    async def read_next(self, call: grpc.aio.ServicerContext, last_size: int) -> bytes | None:
        """Return the next message of a stream, or None after its last one; `last_size` is that of the last message."""
        if last_size < LARGE_BODY_BYTES:
            return await receive_message(call)
        await self._turn.acquire()
        async with self._take_turn(MAX_STREAM_TURN_SECONDS):
            return await receive_message(call)

    async def _wait(self, connection: str) -> asyncio.Lock | None:
        """Acquire the place of a connection and then the turn; None if its last message is small by then."""
        place, seconds = self._large[connection], self._settings.current.queue_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await place.acquire()
                try:
                    await self._turn.acquire()
                except BaseException:
                    place.release()
                    raise
        except TimeoutError:
            text = f"The message waited {seconds:g} s for other large messages. Retry later."
            raise Unavailable("message", f"a wait of {seconds:g} s", f"at most {seconds:g} s", message=text) from None
        if self._large.get(connection) is place:
            return place
        self._turn.release()
        place.release()
        return None

    @asynccontextmanager
    async def _take_turn(self, seconds: float, place: asyncio.Lock | None = None) -> AsyncIterator[None]:
        """Run the block in a turn, which ends early if the block takes longer than `seconds`; then pause."""
        loop, began, worked = asyncio.get_running_loop(), perf_counter(), process_time()
        over = False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                if place is not None:
                    place.release()
                loop.call_later(min(perf_counter() - began, process_time() - worked), self._turn.release)

        timeout = loop.call_later(seconds, end)
        try:
            yield
        finally:
            timeout.cancel()
            end()

    def _remember(self, connection: str, size: int) -> None:
        place = self._large.pop(connection, None)
        if size >= LARGE_BODY_BYTES:
            self._large[connection] = place or asyncio.Lock()
            if len(self._large) > MAX_CONNECTIONS:
                del self._large[next(iter(self._large))]
