"""Bytes on sockets, as no library would send them."""

import json
import re
import socket
import struct
import time

import httpx

from tests.support.connections import dial
from tests.support.processes import status_bytes
from tests.support.servers import Server

IDS = [1, 6, 0]
UPGRADE = (
    b"GET /models/gpt/decode HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + b"A" * 22 + b"==\r\n\r\n"
)


def connection(server: Server, timeout: float = 20) -> socket.socket:
    return dial(server.address, timeout)


def request(path: str = "/models/gpt/embed", body: bytes | None = None, *headers: str) -> bytes:
    """Return a request, whole and right unless `headers` say otherwise."""
    body = json.dumps({"input_ids": [IDS], "offset": 2}).encode() if body is None else body
    lines = ["Host: localhost", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def received(stream: socket.socket, most: int = 2**30) -> bytes:
    """Return what comes until the server closes."""
    parts, size = [], 0
    while size < most and (part := stream.recv(2**16)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def status(answer: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert found, answer[:100]
    return int(found[1])


def frame(opcode: int, payload: bytes, fin: bool = True) -> bytes:
    """Return a WebSocket frame of a client (RFC 6455, section 5.2), masked with zeros."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + struct.pack(">H", size)
    return bytes([0x80 * fin | opcode]) + length + bytes(4) + payload


def web_socket(server: Server) -> socket.socket:
    stream = connection(server)
    stream.sendall(UPGRADE)
    assert status(stream.recv(2**16)) == 101
    return stream


def still_right(http: httpx.Client, expected: bytes) -> None:
    """Check that a good request gets the right bits, soon."""
    begin = time.monotonic()
    headers = {"Accept": "application/octet-stream"}
    answer = http.post("/models/gpt/embed", json={"input_ids": [IDS], "offset": 2}, headers=headers)
    assert (answer.status_code, answer.content) == (200, expected)
    assert time.monotonic() - begin < 10


def memory(pid: int) -> int:
    """Return the bytes of a process without pages of files."""
    return status_bytes(pid, "RssAnon")
