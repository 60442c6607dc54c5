"""Large bodies and messages that never end: the memory of all together. Measured by proc(5)."""

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.reliability.wires import UPGRADE
from tests.support.connections import dial, http_request
from tests.support.processes import status_bytes
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

LARGEST, CLIENTS = 2**22, 60
QUEUE_SECONDS = 2
MAX_GROWTH_BYTES = 100 * 2**20
"""For 16 MiB of the bound, 4 of the oldest body, and 256 kB and some buffers of each client; all would send 240 MiB."""
PART = LARGEST - 1000
EMBED, DECODE = "/models/gpt/embed", "/models/gpt/decode"
CHUNKED = {"Transfer-Encoding": "chunked"}
LINES = {"Content-Type": "application/x-ndjson", **CHUNKED}
CHUNK, FRAME = b"%x\r\n" % LARGEST, b"\x81\xff" + struct.pack(">Q", LARGEST) + bytes(4)
BEGUN = {
    "length": http_request(EMBED, bytes(LARGEST))[:-LARGEST] + bytes(PART),
    "chunks": http_request(EMBED, CHUNK + b" " * PART, CHUNKED),
    "line": http_request(DECODE, CHUNK + b" " * PART, LINES),
    "frame": UPGRADE + FRAME + b" " * PART,
    "fragments": UPGRADE
    + (b"\x01\xfe\xff\xff" + bytes(4) + b" " * 65535)
    + (b"\x00\xfe\xff\xff" + bytes(4) + b" " * 65535) * (PART // 65535 - 1),
}
"""Bytes of each client: nearly a whole body or message."""
WHOLE = b'{"input_ids": [[1, 2]]}'


@pytest.fixture(scope="module", params=BEGUN)
def begun(request: pytest.FixtureRequest, tiny_repository: Path) -> Iterator[tuple[Server, bytes]]:
    """Serve with memory of its own for each kind of request."""
    options = "--max-body-bytes", str(LARGEST), "--queue-timeout-seconds", str(QUEUE_SECONDS)
    with serve(tiny_repository, *options) as server:
        yield server, BEGUN[request.param]


def send(stream: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the server reads no more, or has refused it
        stream.sendall(data)


def test_incomplete_large_bodies_share_a_bound(begun: tuple[Server, bytes]) -> None:
    server, data = begun
    with httpx.Client(base_url=server.address, timeout=60) as http, ExitStack() as stack:
        assert http.post(EMBED, content=WHOLE).status_code == 200
        before = status_bytes(server.pid, "VmRSS")
        streams = [stack.enter_context(dial(server.address, timeout=10)) for _ in range(CLIENTS)]
        threads = [Thread(target=send, args=(stream, data)) for stream in streams]
        for thread in threads:
            thread.start()
        statuses = [http.post(EMBED, content=WHOLE).status_code for _ in range(20)]
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert status_bytes(server.pid, "VmHWM") < before + MAX_GROWTH_BYTES
        wait_until(lambda: http.post(EMBED, content=WHOLE.ljust(LARGEST)).status_code == 200)
