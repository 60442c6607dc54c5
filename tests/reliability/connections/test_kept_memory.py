"""Memory after long headers and half handshakes: of prepared requests, of idle connections, and of closed ones."""

import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from tests.reliability.wires import memory
from tests.support.connections import RawConnection, dial, http_request
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

MOST = 20 * 2**20
BODY = b'{"input_ids": [1]}'


def long_request(kind: str, size: int, number: int = 0) -> bytes:
    headers = {"X-Long": f"{number:08d}" * (size // 8)}
    return (
        http_request("/models/gpt/embed", BODY, headers)
        if kind == "POST"
        else http_request("/models", headers=headers, method="GET")
    )


def warm(server: Server) -> int:
    """Ask for once, and return the memory of the server."""
    with RawConnection(server.address) as client:
        for kind in ("GET", "POST"):
            assert client.ask(long_request(kind, 8))[0] == 200
    return memory(server.pid)


def test_prepared_requests_of_long_heads_use_bounded_memory(tiny_repository: Path) -> None:
    with serve(tiny_repository) as server:
        before = warm(server)
        with RawConnection(server.address) as client:
            for number in range(600):
                assert client.ask(long_request("POST", 60_000, number))[0] == 200
        assert memory(server.pid) - before < MOST


@pytest.mark.parametrize(("kind", "size"), [("GET", 60_000), ("POST", 14_000), ("POST", 60_000)])
def test_idle_connection_keeps_no_long_head(tiny_repository: Path, kind: str, size: int) -> None:
    with serve(tiny_repository) as server, ExitStack() as stack:
        before = warm(server)
        for _ in range(400):
            client = stack.enter_context(RawConnection(server.address))
            for _ in range(2):
                assert client.ask(long_request(kind, size))[0] == 200
        assert memory(server.pid) - before < 400 * 2**14 + MOST // 4


@pytest.mark.parametrize("kind", ["GET", "POST"])
def test_reset_connection_leaves_no_memory_in_use(tiny_repository: Path, kind: str) -> None:
    with serve(tiny_repository) as server:
        before = warm(server)
        for _ in range(3000):
            with RawConnection(server.address) as client:
                assert client.ask(long_request(kind, 8000))[0] == 200
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: memory(server.pid) - before < MOST, 5)


def test_half_handshakes_leave_no_memory(tiny_repository: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    with serve(tiny_repository, "--tls-cert-file", str(certificate), "--tls-key", str(key)) as server:
        before = memory(server.pid)
        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(800):
                    stack.enter_context(dial(server.address)).sendall(b"\x16\x03\x01\x02\x00")
                time.sleep(0.5)
        wait_until(lambda: memory(server.pid) - before < MOST, 60)
