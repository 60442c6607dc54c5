"""Keepalive pings of clients, in frames of RFC 9113, sections 6.5 to 6.8."""

import socket
import struct
import time

import pytest

from tests.support.servers import Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
ENHANCE_YOUR_CALM = 11
MIN_SECONDS, STRIKES = 5, 2
"""Least time between two pings, and earlier pings that gRPC forgives."""


def send(connection: socket.socket, kind: int, content: bytes = b"") -> None:
    connection.sendall(struct.pack(">HBBBI", 0, len(content), kind, 0, 0) + content)


def receive(connection: socket.socket, kind: int) -> tuple[int, bytes]:
    """Return flags and content of the next frame of `kind`; fail at an earlier GOAWAY."""
    while True:
        high, low, got, flags, _ = struct.unpack(">HBBBI", connection.recv(9, socket.MSG_WAITALL))
        content = connection.recv((high << 8) + low, socket.MSG_WAITALL)
        if got == kind:
            return flags, content
        assert got != GOAWAY, content


def ping(connection: socket.socket, number: int) -> None:
    content = struct.pack(">Q", number)
    send(connection, PING, content)
    assert receive(connection, PING) == (ACK, content)


def test_pings_of_idle_connection_are_answered(tiny_server: Server) -> None:
    host, _, port = tiny_server.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(PREFACE)
        send(connection, SETTINGS)
        for number in range(1 + STRIKES):
            ping(connection, number)
        time.sleep(MIN_SECONDS + 0.2)
        ping(connection, 9)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # a GOAWAY would follow at once
            receive(connection, PING)
        connection.settimeout(10)
        send(connection, PING, bytes(8))
        _, content = receive(connection, GOAWAY)
        assert content[4:8] == struct.pack(">I", ENHANCE_YOUR_CALM)
        assert content[8:] == b"too_many_pings"
