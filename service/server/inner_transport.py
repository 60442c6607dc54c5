"""The transport of a contained protocol writes to the connection, and leaves closing and pausing to callbacks."""

import asyncio
from collections.abc import Callable
from typing import Any


class InnerTransport(asyncio.Transport):
    """Forwards to the transport of the connection.

    Args:
        transport: of the connection.
        close: called in place of closing the connection.
        is_closing: returns whether the connection is closed or closing.
        pause_reading: called in place of pausing the connection.
        resume_reading: called in place of resuming the connection.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        is_closing: Callable[[], bool],
        pause_reading: Callable[[], None],
        resume_reading: Callable[[], None],
    ) -> None:
        super().__init__()
        self._transport = transport
        self.close = close  # type: ignore[method-assign]
        self.is_closing = is_closing  # type: ignore[method-assign]
        self.pause_reading = pause_reading  # type: ignore[method-assign]
        self.resume_reading = resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write, unless the connection is closing."""
        if not self.is_closing():
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information of the connection's transport."""
        return self._transport.get_extra_info(name, default)
