"""Turns of large responses: other requests run between two chunks, whatever the number of responses."""

import asyncio
from collections import deque


class WriteTurns:
    """Lets one large response compute and write a chunk in each iteration of the event loop, in order."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, next_chunk: bool = True) -> None:
        """Wait for a turn; a response that is alone waits for the next iteration only, and not for its first chunk."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._give)
            if next_chunk:
                await asyncio.sleep(0)  # unlike a future, it needs no task

    def _give(self) -> None:
        """Give the turn to the next response."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give)
                return
        self._taken = False
