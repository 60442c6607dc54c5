"""The transport of a contained protocol: it writes to the real one, and leaves closing and pauses to its owner."""

import asyncio
from typing import Any, Protocol


class TransportOwner(Protocol):
    """The connection around a contained protocol."""

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of the connection."""

    def close(self) -> None:
        """Close the connection, or ignore the contained protocol's request."""

    def pause_reading(self) -> None:
        """Give the contained protocol no input until `resume_reading`."""

    def resume_reading(self) -> None:
        """Give the contained protocol input again."""


class InnerTransport(asyncio.Transport):
    """A transport that forwards to the connection.

    Args:
        owner: the connection.

    """

    def __init__(self, owner: TransportOwner) -> None:
        super().__init__()
        self._owner = owner
        self.close = owner.close  # type: ignore[method-assign]
        self.pause_reading = owner.pause_reading  # type: ignore[method-assign]
        self.resume_reading = owner.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, unless the connection is closing."""
        if not self.is_closing():
            self._owner.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._owner.transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information of the real transport."""
        return self._owner.transport.get_extra_info(name, default)
