"""Clients of a real proxy with two servers; one dies."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.client.errors import ServiceError
from tests.client.conftest import Connect
from tests.support.haproxy import haproxy, needs_haproxy
from tests.support.servers import Server, free_port, serve_replicas
from tests.support.waiting import wait_until

SETTINGS = """
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
    option redispatch 1
frontend http
    bind 127.0.0.1:{port}
    default_backend http
backend http
    # The kernel accepts a connection of a check for a stopped server, and refuses it for a dead one.
    default-server check inter 50ms fall 1 rise 1 observe layer4 error-limit 1 on-error mark-down
    server first 127.0.0.1:{first}
    server second 127.0.0.1:{second} backup
"""
pytestmark = needs_haproxy


class Pair:
    """Two servers behind a proxy; it uses the second if the first cannot be reached."""

    def __init__(self, address: str, first: "subprocess.Popen[str]", first_address: str) -> None:
        self.address = address
        self._first, self._first_address = first, first_address

    def kill_first(self) -> None:
        self._first.kill()
        self._first.wait()

    def kill_first_during(self, call: Callable[[], object]) -> None:
        """Stop the first server, begin `call` in its queue, and kill the server before it can answer."""
        self._first.send_signal(signal.SIGSTOP)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(self._has_unread_bytes)
        self.kill_first()
        thread.join(60)
        if failures:
            raise failures[0]

    def _has_unread_bytes(self) -> bool:
        """Return whether a connection of the stopped server holds a request, by the kernel's table of sockets."""
        local = f":{httpx.URL(self._first_address).port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(local) and row[3] == "01" and int(row[4].split(":")[1], 16) for row in rows)


@pytest.fixture
def pair(tiny_repository: Path, tiny_server: Server, tmp_path: Path) -> Iterator[Pair]:
    port = free_port()
    with serve_replicas(tiny_repository, 1) as replicas:
        ((address, first),) = replicas.items()
        ports = {"first": httpx.URL(address).port, "second": httpx.URL(tiny_server.address).port}
        with haproxy(SETTINGS.format(port=port, **ports), port, tmp_path) as proxy:
            yield Pair(proxy, first, address)


def test_call_is_sent_again_after_the_502_of_a_proxy(connect: Connect, pair: Pair, tiny_server: Server) -> None:
    expected = connect(tiny_server.address).embed([1, 2], model="gpt").vectors
    client = connect(pair.address, retries=1)
    assert np.array_equal(client.embed([1, 2], model="gpt").vectors, expected)
    found = []
    pair.kill_first_during(lambda: found.append(client.embed([1, 2], model="gpt").vectors))
    assert np.array_equal(found[0], expected)


def test_proxy_answers_502_if_its_server_dies(connect: Connect, pair: Pair) -> None:
    client = connect(pair.address, retries=0)
    with pytest.raises(ServiceError) as raised:
        pair.kill_first_during(client.models)
    assert (raised.value.kind, raised.value.status) == ("status 502", 502)


def test_stream_opens_after_the_502_of_a_proxy(connect: Connect, pair: Pair, tiny_server: Server) -> None:
    expected = connect(tiny_server.address).embed([1, 2], model="gpt").vectors
    client = connect(pair.address, retries=1)
    found = []

    def decode() -> None:
        with client.decode("gpt", resume=True) as stream:
            found.append(stream.step([1, 2]))

    pair.kill_first_during(decode)
    assert np.array_equal(found[0], expected)


def test_stream_resumes_behind_a_proxy(connect: Connect, pair: Pair, tiny_server: Server) -> None:
    tokens = [1, 2, 3, 4]
    whole = connect(tiny_server.address).embed(tokens, model="gpt").vectors
    with connect(pair.address).decode("gpt", resume=True) as stream:
        for place, token in enumerate(tokens):
            assert np.array_equal(stream.step([token]), whole[:, place : place + 1])
            if place == 1:
                pair.kill_first()
