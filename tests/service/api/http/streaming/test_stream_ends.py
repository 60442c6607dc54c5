"""Ends of streams by time limits and by shutdown, and clients without a reader."""

import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.service.api.http.streaming.frames import CLOSING, PING, REWIND, head, operation, step
from tests.support.connections import dial, http_request
from tests.support.processes import status_bytes
from tests.support.scrapes import read_metrics, wait_for_streams
from tests.support.servers import Server, serve

DECODE = "/models/gpt2-small/decode"
EVENTS = {"Accept": "text/event-stream"}
CHUNKED_LINES = {"Content-Type": "application/x-ndjson", "Transfer-Encoding": "chunked"}


@pytest.fixture(scope="module")
def impatient(model_repository: Path) -> Iterator[Server]:
    """Serve with an idle timeout of one second and a stream lifetime of two."""
    limits = {"PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS": "1", "PREBLOCK_STREAM_MAX_LIFETIME_SECONDS": "2"}
    with serve(model_repository, **limits) as running, httpx.Client(base_url=running.address) as http:
        assert http.get("/readyz").status_code == 200
        yield running


def open_stream(server: Server, query: str = "?offset=[4,2]") -> ClientConnection:
    return connect(f"{server.socket}{DECODE}{query}")


def last_words(stream: ClientConnection) -> tuple[Any, int, Any]:
    """Return the last message before the stream was closed, the code and the reason."""
    last: Any = None
    with suppress(ConnectionClosed):
        for message in stream:
            last = message
    assert stream.close_code is not None
    assert stream.close_reason is not None
    return last, stream.close_code, json.loads(stream.close_reason)


def closing_frame(*offsets: int, reason: str) -> bytes:
    return head(CLOSING, len(offsets)) + struct.pack(f"<{len(offsets)}q", *offsets) + reason.encode()


def test_idle_stream_is_closed_with_its_offsets(impatient: Server) -> None:
    """The close message has the format of the client's last message."""
    with ExitStack() as stack:
        begin = time.monotonic()
        text = stack.enter_context(open_stream(impatient))
        text.send('{"input_ids": [[1], [2]]}')
        frame = stack.enter_context(open_stream(impatient))
        frame.send(head(PING))
        silent = stack.enter_context(open_stream(impatient))
        found = {"closing": "idle", "next_offset": [4, 2]}
        assert last_words(silent) == (None, 1008, found)
        assert 0.9 < time.monotonic() - begin < 6
        assert last_words(frame) == (closing_frame(4, 2, reason="idle"), 1008, found)
        last, code, reason = last_words(text)
    assert json.loads(last) == reason == {"closing": "idle", "next_offset": [5, 3]}
    assert code == 1008


def test_busy_stream_is_closed_at_max_lifetime(impatient: Server) -> None:
    begin = time.monotonic()
    with open_stream(impatient) as stream:
        with suppress(ConnectionClosed):
            while True:
                stream.send(head(PING))
                stream.recv(timeout=20)
        assert last_words(stream)[1:] == (1008, {"closing": "time", "next_offset": [4, 2]})
        assert 1.9 < time.monotonic() - begin < 6


def tokens_of(http: httpx.Client) -> float:
    """Return the number of embedded tokens."""
    return read_metrics(http).get(("preblock_tokens_total", "gpt2-small"), 0)


def floods() -> dict[str, tuple[bytes, bytes]]:
    """Return, for each protocol, bytes to send once and bytes to repeat, for answers without a reader."""
    ids = [1] * 1000
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "A" * 22 + "=="
    frame, rewind = step([ids]), operation(REWIND, 0)
    framed = b"\x82\xfe" + struct.pack(">H", len(frame)) + bytes(4) + frame
    framed += b"\x82" + bytes([0x80 | len(rewind)]) + bytes(4) + rewind
    line = json.dumps({"input_ids": ids}).encode() + b'\n{"rewind": 0}\n'
    events = json.dumps({"input_ids": [[1] * 1000] * 60, "chunk": 10, "encoding": "float"}).encode()
    return {
        "socket": (http_request(DECODE, headers=upgrade, method="GET"), framed),
        "lines": (http_request(DECODE, headers=CHUNKED_LINES), b"%x\r\n%b\r\n" % (len(line), line)),
        "events": (http_request(DECODE, events, EVENTS), b""),
    }


@pytest.mark.parametrize("protocol", ["socket", "lines", "events"])
def test_unread_stream_is_paused_and_then_closed(impatient: Server, protocol: str) -> None:
    """Each step is answered with 3 MB: a hundred of them would show."""
    first, again = floods()[protocol]
    with httpx.Client(base_url=impatient.address, timeout=20) as http:
        wait_for_streams(http, 0)
        memory, tokens = status_bytes(impatient.pid, "VmRSS"), tokens_of(http)
        with dial(impatient.address) as deaf:
            deaf.sendall(first)
            wait_for_streams(http, 1)
            deaf.settimeout(0.3)
            with suppress(TimeoutError, ConnectionError):  # the buffers are full, or the stream was closed before
                for _ in range(100):
                    deaf.sendall(again)
            assert http.get("/livez").status_code == 200
            assert status_bytes(impatient.pid, "VmRSS") - memory < 64 * 2**20
            wait_for_streams(http, 0)
            assert 0 < tokens_of(http) - tokens < 30_000  # of 60,000 and more


def test_disconnect_frees_stream_before_its_idle_timeout(model_server: Server) -> None:
    with httpx.Client(base_url=model_server.address, timeout=20) as http:
        for first, again in floods().values():
            with dial(model_server.address) as client:
                client.sendall(first + again)
                client.recv(1)
                wait_for_streams(http, 1)
            wait_for_streams(http, 0)


def test_shutdown_sends_offsets_to_every_stream(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--workers", "2") as server:
        path = "models/gpt/decode?offset=[1,2]"
        with httpx.Client(base_url=server.address, timeout=20) as http:
            assert http.get("/readyz").status_code == 200
        with connect(f"{server.socket}/{path}") as text, connect(f"{server.socket}/{path}") as frame:
            text.send('{"input_ids": [[1], []]}')
            text.recv()
            frame.send(head(PING))
            frame.recv()
            with dial(server.address) as lines, lines.makefile("rb") as answer:
                lines.sendall(http_request(f"/{path}", headers=CHUNKED_LINES))
                assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
                begin = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                closing = {"closing": "shutdown", "next_offset": [2, 2]}
                assert last_words(text) == (json.dumps(closing, separators=(",", ":")), 1012, closing)
                closing = {"closing": "shutdown", "next_offset": [1, 2]}
                assert last_words(frame) == (closing_frame(1, 2, reason="shutdown"), 1012, closing)
                assert b'{"closing":"shutdown","next_offset":[1,2]}\n' in answer.read()
        server.process.wait(20)
        assert time.monotonic() - begin < 15


def test_long_close_reason_is_cut_to_one_word(impatient: Server) -> None:
    with open_stream(impatient, "?rows=60") as stream:
        stream.send('{"ping": true}')
        words = stream.recv(), stream.recv()
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv()
    assert json.loads(words[1])["next_offset"] == [0] * 60
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "idle"


def narrow(server: Server) -> socket.socket:
    """Return a connection with a small buffer."""
    url, connection = httpx.URL(server.address), socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.settimeout(20)
    connection.connect((url.host, url.port))
    return connection


def documents(connection: socket.socket) -> list[Any]:
    """Return the answers until the end of a connection, without the headers of HTTP and of its chunks."""
    with connection.makefile("rb") as answer:
        lines = [line.removeprefix(b"data: ") for line in answer]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def test_unsent_response_is_not_counted_in_last_offset(model_repository: Path) -> None:
    """No client reads anything until the shutdown begins, so that an answer waits."""
    messages = [json.dumps({"input_ids": [1] * 1000}), '{"rewind": 0}'] * 5
    body = "".join(f"{message}\n" for message in messages).encode()
    events = json.dumps({"input_ids": [[1] * 1000] * 60, "chunk": 10}).encode()
    with serve(model_repository) as server, httpx.Client(base_url=server.address, timeout=20) as http:
        with (
            narrow(server) as lines,
            narrow(server) as deaf,
            connect(server.socket + DECODE, sock=narrow(server), max_queue=1, max_size=None) as web,
        ):
            for message in messages:
                web.send(message)
            lines.sendall(http_request(DECODE, headers=CHUNKED_LINES) + b"%x\r\n%b\r\n" % (len(body), body))
            deaf.sendall(http_request(DECODE, events, EVENTS))
            wait_for_streams(http, 3)
            time.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            with ThreadPoolExecutor() as threads:
                found = [*threads.map(documents, (lines, deaf)), []]
            with suppress(ConnectionClosed):
                for text in web:
                    found[-1].append(json.loads(text))
        server.process.wait(30)
    for *_, last, closing in found:
        assert closing == {"closing": "shutdown", "next_offset": last["next_offset"]}
