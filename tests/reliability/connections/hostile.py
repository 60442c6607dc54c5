"""Hostile input, and the proof that it harms nobody else."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tests.reliability.wires import memory, request, still_right
from tests.support.servers import Server

MOST = 24 * 2**20
"""Limit of the server's memory growth for a client with ten times as many bytes, in bytes."""


@contextmanager
def unharmed(server: Server, http: httpx.Client, expected: bytes) -> Iterator[None]:
    """Check the answers to others during and after a block, and the growth of the server."""
    still_right(http, expected)
    before = memory(server.pid)
    over = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            with httpx.Client(base_url=server.address, timeout=60) as other:
                while not over.wait(0.05):
                    still_right(other, expected)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
        grown = memory(server.pid) - before
    finally:
        over.set()
        asking.join()
    assert not failed, failed
    assert grown < MOST
    still_right(http, expected)


def pour(stream: socket.socket, content: bytes, most: int, seconds: float = 2) -> bytes:
    """Send the same again and again until it is not taken, and return the answer."""
    begin, sent = time.monotonic(), 0
    with suppress(ConnectionError, TimeoutError):
        stream.settimeout(1)
        while sent < most and time.monotonic() - begin < seconds:
            stream.sendall(content)
            sent += len(content)
    answer = b""
    with suppress(ConnectionError, TimeoutError):
        answer = stream.recv(2**16)
    return answer


def chunked(body: bytes) -> bytes:
    return request("/models/gpt/embed", body, "Transfer-Encoding: chunked")
