"""A TCP proxy to cut connections at random bytes."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

SHORT = 600
"""Mean bytes until the cut for every tenth connection, to break handshakes too."""


class Proxy:
    """Cuts each connection to a server after a random number of bytes.

    Args:
        target: host and port of the server.
        seed: seed of the random numbers.
        lives: mean bytes until the cut; each connection draws one of them.

    """

    def __init__(self, target: str, seed: int, lives: Sequence[int]) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._random, self._lives = np.random.default_rng(seed), lives
        self._carried: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen on a free port, and return host and port."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the listener and all connections."""
        self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mean = self._random.choice(self._lives) if self._random.random() < 0.9 else SHORT
        life = [int(self._random.exponential(mean))]
        ends = [writer]
        tasks: list[asyncio.Task[None]] = []
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            ends.append(far_writer)
            both = (self._copy(reader, far_writer, life), self._copy(far_reader, writer, life))
            tasks += [asyncio.create_task(one) for one in both]
            self._carried.update(tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._carried.difference_update(tasks)
            for end in ends:
                end.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, life: list[int]) -> None:
        with suppress(OSError):
            while life[0] > 0 and (data := await source.read(2**16)):
                target.write(data[: life[0]])
                life[0] -= len(data)
                await target.drain()
