"""Connections for any bytes, as no client library sends them."""

import re
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

import httpx

UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "A" * 22 + "==",
}
"""Headers that open a WebSocket."""


def dial(address: str | httpx.URL, timeout: float = 20) -> socket.socket:
    """Connect to the host and port of a URL."""
    url = httpx.URL(address)
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout)


def http_request(
    path: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({}), method: str = "POST"
) -> bytes:
    """Return a request of HTTP/1.1 with the length of its body, or without one for chunks."""
    length = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(body))}
    lines = {"Host": "localhost", **length, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class RawConnection:
    """An HTTP/1.1 connection for given bytes and answers of known length.

    Args:
        address: of the server, a URL.

    """

    def __init__(self, address: str) -> None:
        self.stream = dial(address)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.stream.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.stream.close()

    def send(self, *parts: bytes) -> None:
        """Send parts, each read by the server before the next."""
        for part in parts:
            self.stream.sendall(part)
            if part is not parts[-1]:
                time.sleep(0.003)

    def answer(self) -> tuple[int, str, bytes]:
        """Return the status, the header block and the body of the next answer."""
        head = "".join(line.decode() for line in iter(self._line, b"\r\n"))
        (length,) = re.findall(r"content-length: (\d+)", head.lower())
        return int(head.split()[1]), head, self.file.read(int(length))

    def ask(self, sent: bytes) -> tuple[int, str, bytes]:
        """Send a request, and return its answer."""
        self.send(sent)
        return self.answer()

    def _line(self) -> bytes:
        line = self.file.readline()
        assert line, "the connection was closed"
        return line
