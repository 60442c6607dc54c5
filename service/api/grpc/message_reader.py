"""Messages of gRPC calls: connections with large messages take turns, so that other clients are served between them.

gRPC's library copies a whole message in the event loop, 16 MiB in some 6 ms, and nothing can interrupt it. But it
receives the message only when the service reads it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter, process_time

import grpc

from preblock.service.core.body_memory import LARGE_BODY_BYTES

MAX_TURN_SECONDS = 0.1
"""A turn ends after this time, complete or not: a slow client does not stop the others."""
MAX_CONNECTIONS = 2**12
"""Most connections with large messages that are known; the connection with the oldest message is forgotten first."""


class MessageReader:
    """Reads the messages of calls. A message waits for a turn if the last one of its connection was large.

    The first message of a connection has no known size, and waits for nothing.
    """

    def __init__(self) -> None:
        self._large: dict[str, None] = {}  # connections, oldest message first
        self._turn = asyncio.Lock()

    async def read(self, call: grpc.aio.ServicerContext) -> bytes | None:
        """Return the next message of a call, or None after its last one."""
        connection = call.peer()
        if connection in self._large:
            async with self._take_turn():
                message = await call.read()
        else:
            message = await call.read()
        if message is grpc.aio.EOF:
            return None
        received: bytes = message
        self._remember(connection, len(received))
        return received

    @asynccontextmanager
    async def _take_turn(self) -> AsyncIterator[None]:
        """Run the block in a turn. A pause follows, as long as this process has worked during the turn."""
        await self._turn.acquire()
        loop, began, worked = asyncio.get_running_loop(), perf_counter(), process_time()

        def end() -> None:
            loop.call_later(min(perf_counter() - began, process_time() - worked), self._turn.release)

        timeout = loop.call_later(MAX_TURN_SECONDS, end)
        try:
            yield
        finally:
            if perf_counter() - began < MAX_TURN_SECONDS:
                timeout.cancel()
                end()

    def _remember(self, connection: str, size: int) -> None:
        self._large.pop(connection, None)
        if size >= LARGE_BODY_BYTES:
            self._large[connection] = None
            if len(self._large) > MAX_CONNECTIONS:
                del self._large[next(iter(self._large))]
