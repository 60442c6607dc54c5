"""Lingering close: the client reads the last response, even if it still sends input (RFC 9112, section 9.6).

A socket closed with unread input resets the connection, and a reset discards responses on their way to the client.
"""

import asyncio
from typing import Any

MAX_DISCARDED_BYTES = 2**26
"""Enough for several messages of the default limit."""
MAX_SECONDS = 2.0
MAX_TLS_SECONDS = 0.2
"""Shorter: without a half-close, the client sees the end of the connection only after this time."""


class LingeringClose(asyncio.Protocol):
    """Half-closes a connection, and discards input until the client closes it too, within two limits.

    Args:
        transport: of the connection; this protocol replaces its protocol.
        loop: of the connection.
        connections: open connections of the server.
        ended: the client announced the end of its input; over TLS it need not wait. Default False.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        connections: set[Any],
        ended: bool = False,
    ) -> None:
        self._transport, self._connections, self._discarded = transport, connections, 0
        connections.add(self)
        transport.set_protocol(self)
        half_closes = transport.can_write_eof()
        if half_closes:
            transport.write_eof()
        tls_seconds = 0.0 if ended else MAX_TLS_SECONDS
        self._timer = loop.call_later(MAX_SECONDS if half_closes else tls_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        """Discard input."""
        self._discarded += len(data)
        if self._discarded > MAX_DISCARDED_BYTES:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio passes it
        """Release the timer."""
        self._timer.cancel()
        self._connections.discard(self)

    def shutdown(self) -> None:
        """Close the connection at once, because the server stops."""
        self._transport.close()
