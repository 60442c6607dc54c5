"""TLS of connections: the handshake of a client, and a transport that also counts the bytes waiting below TLS.

A handshake holds a descriptor before the connection has a protocol. The TLS of an event loop encrypts any number of
bytes at once, and hands them to the transport below, however many wait there. It counts only its own bytes, so a
message of any size seems to be sent. Its buffer keeps the size of the largest message.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Any, cast

from preblock.service.core.tasks import run_eagerly
from preblock.service.server.descriptor_reserve import DescriptorReserve, WaitingConnection

SLICE_BYTES = 2**16
"""Bytes to encrypt at a time: OpenSSL never shrinks its buffer."""
LOG = logging.getLogger(__name__)


class TlsTransport(asyncio.Transport):
    """Writes in slices, and passes the pauses of the transport below to the protocol.

    Args:
        plain: transport of the connection; its protocol is the TLS.
        secure: transport above the TLS.

    """

    def __init__(self, plain: asyncio.Transport, secure: asyncio.Transport) -> None:
        super().__init__()
        self._plain, self._secure = plain, secure
        self.is_closing = secure.is_closing  # type: ignore[method-assign]
        self.close = secure.close  # type: ignore[method-assign]
        self.abort = secure.abort  # type: ignore[method-assign]
        self.pause_reading = secure.pause_reading  # type: ignore[method-assign]
        self.resume_reading = secure.resume_reading  # type: ignore[method-assign]
        self.set_protocol = secure.set_protocol  # type: ignore[method-assign]
        self.can_write_eof = secure.can_write_eof  # type: ignore[method-assign]
        self.get_extra_info = secure.get_extra_info  # type: ignore[method-assign]
        plain.set_protocol(_Pauses(cast(asyncio.BufferedProtocol, plain.get_protocol()), secure))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes."""
        if len(data) <= SLICE_BYTES:
            self._secure.write(data)
            return
        view = memoryview(data)
        for begin in range(0, len(view), SLICE_BYTES):
            if not self.is_closing():
                self._secure.write(view[begin : begin + SLICE_BYTES])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write parts; short ones as one record of TLS."""
        parts = [*list_of_data]
        for part in [b"".join(parts)] if sum(map(len, parts)) <= SLICE_BYTES else parts:
            self.write(part)

    def get_write_buffer_size(self) -> int:
        """Return the bytes that wait in TLS and below."""
        return self._secure.get_write_buffer_size() + self._plain.get_write_buffer_size()


class _Pauses(asyncio.BufferedProtocol):
    """Stands between a transport and its TLS. TLS is never paused, so its buffer stays small.

    Args:
        tls: the TLS.
        secure: transport above the TLS.

    """

    def __init__(self, tls: asyncio.BufferedProtocol, secure: asyncio.Transport) -> None:
        self._secure = secure
        # Without a frame of Python for each read. uvloop's TLS is no subclass, but has these methods.
        self.get_buffer = tls.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = tls.buffer_updated  # type: ignore[method-assign]
        self.eof_received = tls.eof_received  # type: ignore[method-assign]
        self.connection_lost = tls.connection_lost  # type: ignore[method-assign]

    def pause_writing(self) -> None:
        """Pause the protocol above TLS."""
        if (protocol := self._secure.get_protocol()) is not None:  # none after the end of the connection
            protocol.pause_writing()

    def resume_writing(self) -> None:
        """Resume the protocol above TLS."""
        if (protocol := self._secure.get_protocol()) is not None:
            protocol.resume_writing()


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
