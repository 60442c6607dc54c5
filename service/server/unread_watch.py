"""Ends connections whose clients do not read a large response, while other responses wait for its memory."""

import asyncio
import logging
import struct
from collections.abc import Callable
from fcntl import ioctl
from termios import TIOCOUTQ

from preblock.service.api.http.dispatcher import Services

LOG = logging.getLogger(__name__)
MAX_CHECK_SECONDS = 10.0
"""Longest interval of two checks."""


class UnreadWatch:
    """Watches the unsent bytes of one connection while its client does not read.

    Args:
        transport: of the connection.
        loop: of the connection.
        services: settings, and the memory of large responses.
        held: returns the bytes of that memory that the connection holds.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        services: Services,
        held: Callable[[], int],
    ) -> None:
        self._transport, self._loop, self._held = transport, loop, held
        self._responses, self._live = services.limits.responses, services.settings
        self._unsent, self._since = 0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch, because writing is paused."""
        if self._timer is None:
            self._unsent, self._since = -1, self._loop.time()
            self._wait(self._live.current.body_timeout_seconds)

    def stop(self) -> None:
        """End the watch, because the client has read, or has left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        now, unsent, seconds = self._loop.time(), self._count_unsent(), self._live.current.body_timeout_seconds
        if unsent != self._unsent or not self._held():
            self._unsent, self._since = unsent, now
        elif now - self._since >= seconds and self._responses.is_awaited:
            text = "closing a connection: its client read nothing for %.0f s, and other responses wait for memory"
            LOG.info(text, now - self._since)
            self._transport.abort()
            return
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        self._timer = self._loop.call_later(min(MAX_CHECK_SECONDS, seconds), self._check)

    def _count_unsent(self) -> int:
        """Return the bytes in the buffers of the transport and of the system that the client has not received."""
        file = self._transport.get_extra_info("socket").fileno()
        queued: int = struct.unpack("i", ioctl(file, TIOCOUTQ, bytes(4)))[0]
        return self._transport.get_write_buffer_size() + queued
