"""Idle connections: kept for longer than the pools of clients and proxies keep them, then closed."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.service.server.http_protocol.requests import raw
from tests.support.connections import RawConnection, http_request
from tests.support.servers import Server, live_server

POOL_SECONDS = 5
"""So long httpx keeps an idle connection."""
KEPT_SECONDS = 1
"""So long the hasty server keeps one."""


def request(*ids: int) -> bytes:
    path, body, headers = raw(np.array([ids]), 0)
    return http_request(path, body, headers)


@pytest.fixture
def hasty_address(long_repository: Path) -> Iterator[str]:
    settings = Settings(repository=long_repository)
    config = configure(settings, create_app(settings))
    config.timeout_keep_alive = KEPT_SECONDS
    with live_server(config) as port:
        yield f"http://127.0.0.1:{port}"


def test_idle_connection_outlives_pools_of_clients(long_server: Server) -> None:
    with RawConnection(long_server.address) as tensors, RawConnection(long_server.address) as others:
        for pause in (POOL_SECONDS + 0.5, 0):
            assert tensors.ask(request(1, 2))[0] == 200
            assert others.ask(http_request("/livez", method="GET"))[0] == 200
            time.sleep(pause)


def test_idle_connection_is_closed_at_last(hasty_address: str) -> None:
    for sent in (request(1, 2), http_request("/livez", method="GET")):
        with RawConnection(hasty_address) as client:
            assert client.ask(sent)[0] == 200
            began = time.monotonic()
            assert client.stream.recv(1) == b""
            assert time.monotonic() - began > 0.9 * KEPT_SECONDS


def test_repeated_head_waits_for_its_body(hasty_address: str) -> None:
    sent, other = request(1, 2), request(3)
    begin = sent.index(b"\r\n\r\n") + 4
    with RawConnection(hasty_address) as client:
        expected, of_other = client.ask(sent)[2], client.ask(other)[2]
        for _ in range(3):
            assert client.ask(sent)[2] == expected
        client.send(sent[:begin])
        time.sleep(KEPT_SECONDS + 0.5)
        client.send(sent[begin:] + other + sent[:begin])
        assert [client.answer()[2] for _ in range(2)] == [expected, of_other]
        assert client.ask(sent[begin:])[2] == expected
        client.send(sent[:begin])
    with RawConnection(hasty_address) as client:
        assert client.ask(sent)[2] == expected
