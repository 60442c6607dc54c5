"""The TLS handshake of a client, which holds a descriptor before the connection has a protocol."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, cast

from preblock.service.core.tasks import run_eagerly
from preblock.service.server.descriptor_reserve import DescriptorReserve, WaitingConnection
from preblock.service.server.tls_transport import TlsTransport

LOG = logging.getLogger(__name__)


class TlsHandshake(WaitingConnection):
    """Performs the handshake of a client, and passes the connection to its protocol.

    Neither the reserve of descriptors nor a shutdown could end a handshake of the event loop itself.

    Args:
        protocol: returns the protocol of the connection.
        context: TLS of the server.
        timeout_seconds: time of the handshake.
        connections: open connections of the server.
        tasks: of the server.
        reserve: of descriptors.

    """

    def __init__(
        self,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        timeout_seconds: float,
        connections: set[Any],
        tasks: set[asyncio.Task[None]],
        reserve: DescriptorReserve,
    ) -> None:
        self._protocol, self._context, self._seconds = protocol, context, timeout_seconds
        self._connections, self._tasks, self._reserve = connections, tasks, reserve
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._input = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake of a new client, before any input is read."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self._connections.add(self)
        self._reserve.admit(transport.get_extra_info("socket").fileno())
        run_eagerly(self._run(), copy_context(), self._tasks, self._fail)

    def data_received(self, data: bytes) -> None:
        """Keep input that arrives with the end of the handshake."""
        self._input += data

    def waits_since(self) -> tuple[bool, float]:
        """Return that the connection is not idle, and its beginning: the client must still send a request."""
        return False, self._since

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    shutdown = abort

    async def _run(self) -> None:
        try:
            secure = await self._loop.start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._seconds
            )
        except OSError:  # the client has left, is late, or cannot agree with the server
            return
        finally:
            self._connections.discard(self)
        if secure is None or secure.is_closing():  # `abort` ends a handshake without an exception
            return
        protocol = self._protocol()
        secure.set_protocol(protocol)
        protocol.connection_made(TlsTransport(self._transport, secure))
        if self._input:
            protocol.data_received(self._input)

    def _fail(self) -> None:
        LOG.exception("internal error in a connection; it is closed")
        self._transport.abort()
