"""A transport above TLS that also counts the bytes waiting below TLS.

The TLS of an event loop encrypts any number of bytes at once, and hands them to the transport below, however many wait
there. It counts only its own bytes, so a message of any size seems to be sent. Its buffer keeps the size of the largest
message.
"""

import asyncio
from collections.abc import Iterable
from typing import cast

SLICE_BYTES = 2**16
"""Bytes to encrypt at a time: OpenSSL never shrinks its buffer."""


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
