"""Eight replicas behind the proxy of `deploy/`; one is killed under load."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import httpx
import numpy as np
import pytest

import preblock
from preblock.client.sync_client import Client
from tests.support.artifacts import Floats, make_repository, read_tables
from tests.support.haproxy import deployed_settings, haproxy, needs_haproxy
from tests.support.load import POSITIONS, STORED_GPT, VOCABULARY, Load, expected, infer, step
from tests.support.servers import free_port, serve_replicas
from tests.support.waiting import wait_until

REPLICAS = 8
IDS = np.arange(16 * POSITIONS).reshape(16, POSITIONS) % VOCABULARY
"""The body of this request is larger than the buffer of the proxy, so the proxy cannot send it again."""
PLAIN, RETRYING, STREAMS = 8, 4, 16
"""Clients without retries, clients with retries, and decode streams."""
pytestmark = needs_haproxy


class Fleet(NamedTuple):
    """Running replicas by address, the address of their proxy, and the tables of their model."""

    proxy: str
    replicas: "dict[str, subprocess.Popen[str]]"
    tables: dict[str, Floats]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    repository = make_repository(tmp_path_factory.mktemp("replicas"), gpt=STORED_GPT)
    port, folder = free_port(), tmp_path_factory.mktemp("haproxy")
    with serve_replicas(repository, REPLICAS) as replicas, ExitStack() as stack:
        # In turn and without a check, because the proxy would otherwise avoid the stopped replica after a request.
        settings = deployed_settings([*replicas], port)
        for deployed, here in (("balance leastconn", "balance roundrobin"), (" check inter 1s ", " check inter 60s ")):
            assert deployed in settings
            settings = settings.replace(deployed, here)
        proxy = stack.enter_context(haproxy(settings, port, folder))
        wait_until(lambda: httpx.get(f"{proxy}/proxy").status_code == 200)
        yield Fleet(proxy, replicas, read_tables(repository / "gpt" / "1"))


def embed(client: Client, fleet: Fleet) -> int:
    assert np.array_equal(client.embed(IDS, model="gpt").vectors, expected(fleet.tables, IDS))
    return 200


def has_streams(address: str) -> bool:
    return "\npreblock_streams_open 0" not in httpx.get(f"{address}/metrics", timeout=60).text


def test_only_requests_in_flight_of_a_killed_replica_fail(fleet: Fleet) -> None:
    attempts: list[str] = []
    with ExitStack() as stack:
        plain_http = [stack.enter_context(httpx.Client(timeout=60)) for _ in range(PLAIN)]
        hooks = {"request": [lambda request: attempts.append(request.method)]}
        client_http = [stack.enter_context(httpx.Client(event_hooks=hooks)) for _ in range(RETRYING)]
        clients = [stack.enter_context(preblock.connect(fleet.proxy, http_client=http)) for http in client_http]
        streams = [stack.enter_context(clients[0].decode("gpt", resume=True)) for _ in range(STREAMS)]
        plain = [Load(lambda http=http: infer(http, fleet.proxy, fleet.tables)) for http in plain_http]  # type: ignore[misc]
        retrying = [Load(lambda client=client: embed(client, fleet)) for client in clients]  # type: ignore[misc]
        decoding = [Load(lambda stream=stream: step(stream, fleet.tables)) for stream in streams]  # type: ignore[misc]
        loads = [*plain, *retrying, *decoding]
        try:
            wait_until(lambda: all(load.done > 10 for load in loads), 60)
            victim = fleet.replicas[next(filter(has_streams, fleet.replicas))]
            victim.send_signal(signal.SIGSTOP)
            for kind in (plain, retrying, decoding):
                wait_until(lambda kind=kind: any(load.is_stuck for load in kind))  # type: ignore[misc]
            victim.kill()
            victim.wait()
            killed = time.monotonic()
            done = [load.done for load in loads]
            wait_until(lambda: all(load.done > before + 10 for load, before in zip(loads, done, strict=True)), 60)
        finally:
            for load in loads:
                load.end()
    failures = [failure for load in plain for failure in load.failures]
    assert 1 <= len(failures) <= PLAIN
    assert {status for _, status in failures} <= {0, 502}
    assert all(begun < killed for begun, _ in failures)
    assert len(attempts) > sum(load.done for load in retrying)  # the client met failures too, and repeated its requests
