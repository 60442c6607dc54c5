"""What the application writes in one turn of the event loop, sent by one call.

uvicorn writes the head of an answer, its body and its end apart. Who is killed between the two leaves half an answer,
for which no proxy may ask another server again; and each is a call of the kernel, and a segment. What is large is sent
in several calls anyway.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from preblock.service.codecs.chunks import COPIED


class Gathered:
    """A transport, as the answers of the application need it, that keeps what is small until the turn ends.

    Args:
        transport: of the connection.
        loop: of the connection.

    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._kept: list[bytes] = []
        self._size = 0

    def gather(self, cycle: RequestResponseCycle) -> None:
        """Write for the answer to one request."""
        cycle.transport = cast(asyncio.Transport, self)

    def write(self, data: bytes) -> None:
        """Write, at the end of the turn at the latest."""
        if self._size + len(data) > COPIED:
            self.flush()
            self._transport.write(data)
            return
        if not self._kept:
            self._loop.call_soon(self.flush)
        self._kept.append(data)
        self._size += len(data)

    def flush(self) -> None:
        """Write what is kept, now: others are about to write too. A client that has left gets nothing."""
        if self._kept:
            kept, self._kept, self._size = self._kept, [], 0
            if not self._transport.is_closing():
                self._transport.write(b"".join(kept))

    def close(self) -> None:
        """Close the connection when all is written."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._transport.is_closing()
