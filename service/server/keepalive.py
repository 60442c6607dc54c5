"""Pings of a WebSocket: they find clients that vanished."""

import asyncio
import secrets
from collections.abc import Callable

from websockets.server import ServerProtocol

from preblock.service.server.uvicorn_adapter import Config

PAYLOAD_BYTES = 4


class KeepAlive:
    """Sends a ping in every interval, and fails the connection if the client does not answer.

    Args:
        config: of the server; states the interval and the timeout.
        loop: of the connection.
        conn: makes the pings.
        write: sends the bytes of `conn`.
        fail: closes the connection, with a code and a reason.

    """

    def __init__(
        self,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        conn: ServerProtocol,
        write: Callable[[], None],
        fail: Callable[[int, str], None],
    ) -> None:
        self._interval, self._timeout = config.ws_ping_interval, config.ws_ping_timeout
        self._loop, self._conn, self._write, self._fail = loop, conn, write, fail
        self._timer: asyncio.TimerHandle | None = None
        self._payload = b""  # of the unanswered ping

    def start(self) -> None:
        """Send the first ping after an interval."""
        if self._interval:
            self._timer = self._loop.call_later(self._interval, self._ping)

    def stop(self) -> None:
        """Send none any more."""
        if self._timer is not None:
            self._timer.cancel()

    def answered(self, payload: bytes) -> None:
        """Take an answer; another than the expected one says nothing."""
        if self._payload and payload == self._payload:
            self._payload = b""
            self.stop()
            self.start()

    def _ping(self) -> None:
        if self._conn.close_sent is not None:
            return
        self._payload = secrets.token_bytes(PAYLOAD_BYTES)
        self._conn.send_ping(self._payload)
        self._write()
        if self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._fail, 1011, "keepalive ping timeout")
        else:
            self.start()
