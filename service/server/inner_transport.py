"""The transport of a contained HTTP protocol: it joins small writes, and closes only its own answers."""

import asyncio
from typing import Any, Protocol

from preblock.service.codecs.chunks import MIN_WRITE_BYTES


class TransportOwner(Protocol):
    """The connection around the protocol."""

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of the connection."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the connection."""

    def close(self) -> None:
        """Close the connection, if the contained protocol answers."""

    def pause_reading(self) -> None:
        """Read nothing more until `resume_reading`."""

    def resume_reading(self) -> None:
        """Read on."""


class InnerTransport(asyncio.Transport):
    """Keeps small writes until the event-loop iteration ends, and sends them by one call.

    A server killed between two calls would leave half an answer: no proxy may then repeat the request elsewhere.

    Args:
        owner: the connection.

    """

    def __init__(self, owner: TransportOwner) -> None:
        super().__init__()
        self._owner = owner
        self._kept: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, at the end of the iteration at the latest."""
        if self._size + len(data) > MIN_WRITE_BYTES:
            self.flush()
            if not self._owner.transport.is_closing():
                self._owner.transport.write(data)
            return
        if not self._kept:
            self._owner.loop.call_soon(self.flush)
        self._kept.append(bytes(data))
        self._size += len(data)

    def flush(self) -> None:
        """Write the kept bytes, unless the client has left."""
        if self._kept:
            kept, self._kept, self._size = self._kept, [], 0
            if not self._owner.transport.is_closing():
                self._owner.transport.write(b"".join(kept))

    def close(self) -> None:
        """Close the connection behind the answer; between answers the owner decides when to close."""
        self.flush()
        self._owner.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._owner.transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information of the real transport."""
        return self._owner.transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read nothing more until `resume_reading`."""
        self._owner.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._owner.resume_reading()
