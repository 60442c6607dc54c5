"""Requests that the connection refuses itself, and its close: the client reads the refusal, whatever it still sends."""

import re
from contextlib import suppress

import pytest
from websockets.sync.client import connect

from preblock.service.server.lingering_close import MAX_DISCARDED_BYTES
from tests.support.connections import dial
from tests.support.servers import Server

EMBED = b"POST /models/gpt/embed HTTP/1.1\r\n"
BODY = b"Content-Length: 18\r\n\r\n" + b'{"input_ids": [1]}'
UPGRADE = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
CHUNKED = EMBED + b"Host: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
CHUNKED += b"12\r\n" + BODY[-18:] + b"\r\n0\r\n\r\n"
SOCKET = b"GET /models/gpt/decode HTTP/1.1\r\nHost: localhost\r\nSec-WebSocket-Version: 13\r\n" + UPGRADE + b"\r\n"


CODED = EMBED + b"Host: localhost\r\nTransfer-Encoding: %b\r\n\r\n"


def ask(server: Server, sent: bytes) -> tuple[bytes, bytes, bytes]:
    """Send bytes, and return status line, headers and body of the response, which ends the connection."""
    with dial(server.address) as stream:
        stream.sendall(sent)
        answer = b"".join(iter(lambda: stream.recv(2**16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    line, _, headers = head.partition(b"\r\n")
    return line, headers, body


@pytest.mark.parametrize(
    ("sent", "line", "text"),
    [
        (EMBED + BODY, b"400 Bad Request", b"the request has no Host header; HTTP/1.1 requires one"),
        (EMBED + b"Host: y\r\nHOST: y\r\n" + BODY, b"400 Bad Request", b"the request has 2 Host headers; send one"),
        (
            EMBED.replace(b"1.1", b"1.0") + b"Host: y\r\n" * 2 + BODY,
            b"400 Bad Request",
            b"the request has 2 Host headers",
        ),
        (CODED % b"gzip, chunked", b"501 Not Implemented", b"Transfer-Encoding: got gzip, chunked, expected chunked"),
        (CODED % b"identity", b"501 Not Implemented", b"Transfer-Encoding: got identity, expected chunked"),
        (
            EMBED + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n" + BODY,
            b"400 Bad Request",
            b"the request has the headers Content-Length and Transfer-Encoding; send one of them",
        ),
        (b"\x16\x03\x01\r\n\r\n", b"400 Bad Request", b"the request is not valid HTTP/1.1"),
    ],
)
def test_malformed_head_is_rejected(tiny_server: Server, sent: bytes, line: bytes, text: bytes) -> None:
    found = ask(tiny_server, sent)
    assert (found[0], found[2][: len(text)]) == (b"HTTP/1.1 " + line, text)
    assert b"connection: close" in found[1]


def test_input_after_rejection_is_bounded(tiny_server: Server) -> None:
    sent, piece = 0, bytes(2**20)
    with dial(tiny_server.address) as stream, suppress(ConnectionError):
        stream.sendall(EMBED + BODY)
        while sent < 8 * MAX_DISCARDED_BYTES:
            stream.sendall(piece)
            sent += len(piece)
    assert sent < 2 * MAX_DISCARDED_BYTES


@pytest.mark.parametrize(
    "sent",
    [
        EMBED.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\n" + BODY,
        CHUNKED.replace(b"chunked", b"Chunked").replace(b"\r\nContent-Type", b"\r\nConnection: close\r\nContent-Type"),
        b"GET /livez HTTP/1.0\r\n" + UPGRADE + b"Sec-WebSocket-Version: 13\r\n\r\n",
    ],
    ids=["HTTP/1.0 without a host or a wait", "Chunked", "WebSocket over HTTP/1.0"],
)
def test_unusual_head_is_accepted(tiny_server: Server, sent: bytes) -> None:
    assert ask(tiny_server, sent)[0] == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("sent", "space"),
    [
        (EMBED + b"Host: localhost\r\nConnection: close\r\n" + BODY, b" \t "),
        (CHUNKED, b"  "),  # llhttp refuses tabs here
        (SOCKET, b" \t "),
    ],
)
def test_whitespace_around_values_is_ignored(tiny_server: Server, sent: bytes, space: bytes) -> None:
    """RFC 9110, section 5.5."""
    head, end, body = sent.partition(b"\r\n\r\n")
    padded = re.sub(rb": (.+)\r\n", rb":%b\1%b\r\n" % (space, space), head + b"\r\n")
    with dial(tiny_server.address) as stream:
        stream.sendall(padded + end[:2] + body)
        assert stream.recv(2**16)[9:12] == (b"101" if sent is SOCKET else b"200")


def test_unsupported_websocket_version_gets_426(tiny_server: Server) -> None:
    head = b"GET /models/gpt/decode HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE
    for version in (b"8", b"13, 8"):
        line, headers, body = ask(tiny_server, head + b"Sec-WebSocket-Version: " + version + b"\r\n\r\n")
        assert line == b"HTTP/1.1 426 Upgrade Required"
        assert b"sec-websocket-version: 13\r\n" in headers
        assert b"upgrade: websocket\r\n" in headers
        assert body == b"Sec-WebSocket-Version: got " + version + b", expected 13"


@pytest.mark.parametrize("offers", [b"websocket, h2c", b"h2c ,WebSocket", b"h2c\r\nUpgrade: websocket"])
def test_websocket_among_other_protocols_is_opened(tiny_server: Server, offers: bytes) -> None:
    head = b"GET /models/gpt/decode HTTP/1.1\r\nHost: localhost\r\nSec-WebSocket-Version: 13\r\n"
    with dial(tiny_server.address) as stream:
        stream.sendall(head + UPGRADE.replace(b"websocket", offers, 1) + b"\r\n")
        answer = stream.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n")


def test_websocket_compression_is_disabled(tiny_server: Server) -> None:
    with connect(f"{tiny_server.socket}/models/gpt/decode", compression="deflate") as stream:
        assert stream.response is not None
        assert "Sec-WebSocket-Extensions" not in stream.response.headers
