"""Eight replicas behind the proxy of `deploy/`; one is killed under load."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import httpx
import numpy as np
import pytest

import preblock
from preblock.client.sync_client import Client
from preblock.client.sync_stream import DecodeStream
from tests.support.artifacts import Floats, make_repository, read_tables
from tests.support.haproxy import deployed_settings, haproxy, needs_haproxy
from tests.support.servers import free_port, serve_replicas
from tests.support.waiting import wait_until

REPLICAS = 8
VOCABULARY, POSITIONS = 50, 600
IDS = np.arange(16 * POSITIONS).reshape(16, POSITIONS) % VOCABULARY
"""The body of this request is larger than the buffer of the proxy, so the proxy cannot send it again."""
PLAIN, RETRYING, STREAMS = 8, 4, 16
"""Clients without retries, clients with retries, and decode streams."""
STUCK_SECONDS = 2
"""A longer request waits for the stopped replica."""
PAUSE_SECONDS = 0.03
"""Pause of a client between two requests."""
pytestmark = needs_haproxy


class Fleet(NamedTuple):
    """Running replicas by address, the address of their proxy, and the tables of their model."""

    proxy: str
    replicas: "dict[str, subprocess.Popen[str]]"
    tables: dict[str, Floats]

    def expected(self, ids: object, offset: int = 0) -> Floats:
        """Return the vectors of rows of ids, all at one offset."""
        array = np.asarray(ids)
        vectors: Floats = self.tables["tokens"][array] + self.tables["positions"][offset : offset + array.shape[-1]]
        return vectors


class Load:
    """Repeats a call in a thread, and notes the failures.

    Attributes:
        done: number of successful calls.
        begun: start of the running call.
        failures: start and status of each failed call.

    """

    def __init__(self, call: Callable[[], int]) -> None:
        self._call, self._ended = call, threading.Event()
        self.done, self.begun = 0, time.monotonic()
        self.failures: list[tuple[float, int]] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() - self.begun > STUCK_SECONDS

    def end(self) -> None:
        """End after the running call; raise its error."""
        self._ended.set()
        self._thread.join(60)
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            while not self._ended.wait(PAUSE_SECONDS):
                self.begun = time.monotonic()
                status = self._call()
                if status == 200:
                    self.done += 1
                else:
                    self.failures.append((self.begun, status))
        except BaseException as error:
            self._errors.append(error)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    repository = make_repository(tmp_path_factory.mktemp("replicas"), gpt="gpt-50x64x600")
    port, folder = free_port(), tmp_path_factory.mktemp("haproxy")
    with serve_replicas(repository, REPLICAS) as replicas, ExitStack() as stack:
        # In turn, because the proxy would otherwise avoid the stopped replica after its first request.
        settings = deployed_settings([*replicas], port).replace("balance leastconn", "balance roundrobin")
        proxy = stack.enter_context(haproxy(settings, port, folder))
        wait_until(lambda: httpx.get(f"{proxy}/proxy").status_code == 200)
        yield Fleet(proxy, replicas, read_tables(repository / "gpt" / "1"))


def infer(http: httpx.Client, fleet: Fleet) -> int:
    """Send a request of the Open Inference Protocol. The proxy never sends it again.

    Return the status; 0 if the proxy closed the connection. It does so for a request on a connection used before.
    """
    tensor = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [4, 2, 7]}
    try:
        answer = http.post(f"{fleet.proxy}/v2/models/gpt/infer", json={"inputs": [tensor]})
    except httpx.RemoteProtocolError:
        return 0
    if answer.status_code == 200:
        (output,) = (one for one in answer.json()["outputs"] if one["name"] == "embeddings")
        vectors = np.array(output["data"], np.float32).reshape(output["shape"])
        assert np.array_equal(vectors, fleet.expected([[4, 2, 7]]))
    return answer.status_code


def embed(client: Client, fleet: Fleet) -> int:
    assert np.array_equal(client.embed(IDS, model="gpt").vectors, fleet.expected(IDS))
    return 200


def step(stream: DecodeStream, fleet: Fleet) -> int:
    (offset,) = stream.offset
    if offset == POSITIONS:
        stream.rewind(0)
        offset = 0
    assert np.array_equal(stream.step([offset % VOCABULARY]), fleet.expected([[offset % VOCABULARY]], offset))
    assert stream.offset == [offset + 1]
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
        plain = [Load(lambda http=http: infer(http, fleet)) for http in plain_http]  # type: ignore[misc]
        retrying = [Load(lambda client=client: embed(client, fleet)) for client in clients]  # type: ignore[misc]
        decoding = [Load(lambda stream=stream: step(stream, fleet)) for stream in streams]  # type: ignore[misc]
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
