"""Unexpected errors in a connection: status 500 or a reset, one line in the log, and no effect on other connections."""

import dataclasses
import logging
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect as connect_socket

from preblock.service.api.http.response import KnownHttpRequest
from preblock.service.api.prepared import Content, PreparedRequests
from preblock.service.app import create_app
from preblock.service.codecs.chunks import Buffer
from preblock.service.core.errors import Unavailable
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun
from preblock.service.engine.scheduler import BatchFunction, MicroBatch, Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.repository import Repository
from preblock.service.server.run import configure
from tests.service.server.http_protocol.requests import WIDTH, Ids, raw
from tests.support.artifacts import make_repository
from tests.support.connections import RawConnection, http_request
from tests.support.decode_protocols import step_frame
from tests.support.log_lines import logged_errors
from tests.support.servers import live_server

SMALL, LARGE = np.array([[1, 2]]), np.ones((10, 900), np.int64)
INTERNAL = "internal error; the log of the service has the details"


def fail(_: list[Any]) -> list[Any]:
    raise RuntimeError("run")


class BrokenScheduler(Scheduler):
    """Starts no micro-batch while it is broken, or batches that fail.

    Attributes:
        is_broken: whether no batch starts.
        breaks_batches: whether each batch fails.

    """

    is_broken = breaks_batches = False

    def batch(self, key: Hashable, size: int, run: BatchFunction[Any, Any]) -> MicroBatch[Any, Any]:
        if self.is_broken:
            raise RuntimeError("batch")
        return super().batch(key, size, fail if self.breaks_batches else run)


class Broken(PreparedRequests[KnownHttpRequest]):
    """A cache whose requests fail at a stage.

    Attributes:
        stage: of a request; empty for no failure.

    """

    stage = ""

    def find(self, key: Hashable) -> KnownHttpRequest | None:
        known = super().find(key)
        self.fail_at("find")
        if known is None:
            return None
        broken = BrokenRequest(**{field.name: getattr(known, field.name) for field in dataclasses.fields(known)})
        broken.cache = self
        return broken

    def fail_at(self, stage: str) -> None:
        if self.stage == stage:
            raise RuntimeError(stage)


class BrokenRequest(KnownHttpRequest):
    cache: Broken

    def start(self, body: bytes, began: float) -> FastRun | None:
        self.cache.fail_at("start")
        return super().start(body, began)

    def compute(self, run: FastRun) -> tuple[bytes, Content]:
        self.cache.fail_at("compute")
        if self.cache.stage == "refusal":
            raise Unavailable("model", "a lost version", "a served one")
        lines, (size, buffers) = super().compute(run)
        return lines, (size, self.read(buffers) if run.streamed else buffers)

    def read(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        self.cache.fail_at("first chunk")
        for buffer in buffers:
            yield buffer
            if len(buffer) > 2**17:
                self.cache.fail_at("later chunk")


@dataclasses.dataclass
class Served:
    """A server with a broken cache, and its errors in the log."""

    address: str
    scheduler: BrokenScheduler
    cache: Broken
    lines: list[logging.LogRecord]


@pytest.fixture(scope="module")
def failing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root: Path = make_repository(tmp_path_factory.mktemp("models"), gpt="gpt-500x96x900")
    settings = Settings(repository=root, max_concurrent_requests=1)
    live, scheduler = LiveSettings(settings), BrokenScheduler(1, LiveSettings(settings))
    engine = Engine(Repository(root), scheduler, Metrics(), live)
    app = create_app(settings, engine)
    app.prepared = cache = Broken(engine.repository)
    with live_server(configure(settings, app)) as port, logged_errors() as lines:
        yield Served(f"http://127.0.0.1:{port}", scheduler, cache, lines)


def request(ids: Ids, **headers: str) -> bytes:
    path, body, given = raw(ids, 0)
    return http_request(path, body, given | headers)


@pytest.fixture
def other(failing_server: Served) -> Iterator[RawConnection]:
    """Connect another client, whose requests succeed before and after a failure."""
    with RawConnection(failing_server.address) as client:
        for ids in (SMALL, LARGE):
            assert client.ask(request(ids))[0] == 200
        failing_server.lines.clear()
        yield client
        failing_server.cache.stage, failing_server.scheduler.is_broken = "", False
        assert client.ask(request(SMALL))[0] == 200  # no failed request keeps the only place


@pytest.mark.parametrize("known", [False, True], ids=["parsed", "known"])
@pytest.mark.parametrize("stage", ["find", "start", "batch", "compute", "first chunk"])
def test_failed_request_gets_500_with_its_id(
    failing_server: Served, other: RawConnection, stage: str, known: bool
) -> None:
    assert other is not None
    sent = request(LARGE if stage == "first chunk" else SMALL, **{"X-Request-Id": "mine"})
    with RawConnection(failing_server.address) as client:
        for _ in range(3 if known else 0):
            assert client.ask(sent)[0] == 200
        failing_server.cache.stage, failing_server.scheduler.is_broken = stage, stage == "batch"
        status, head, body = client.ask(sent)
    assert (status, INTERNAL.encode() in body, b'"request_id":"mine"' in body) == (500, True, True)
    assert "x-request-id: mine" in head
    (line,) = failing_server.lines
    assert vars(line)["request_id"] == "mine"
    assert line.exc_text or line.exc_info


def test_refused_known_request_names_its_id(failing_server: Served, other: RawConnection) -> None:
    failing_server.cache.stage = "refusal"
    status, _, body = other.ask(request(SMALL, **{"X-Request-Id": "mine"}))
    assert (status, b'"request_id":"mine"' in body) == (503, True)
    assert not failing_server.lines


def test_pipelined_request_that_fails_gets_500(failing_server: Served, other: RawConnection) -> None:
    assert other is not None
    failing_server.cache.stage = "find"
    with RawConnection(failing_server.address) as client:
        client.send(http_request("/livez", method="GET") + request(SMALL))
        assert [client.answer()[0] for _ in range(2)] == [200, 500]


def test_failure_within_response_cuts_it(failing_server: Served, other: RawConnection) -> None:
    assert other is not None
    failing_server.cache.stage = "later chunk"
    with RawConnection(failing_server.address) as client:
        client.send(request(LARGE))
        head = client.file.readline()
        with suppress(ConnectionError):
            assert 0 < len(client.file.read()) < LARGE.size * WIDTH * 4
    assert head == b"HTTP/1.1 200 OK\r\n"
    (line,) = failing_server.lines
    assert vars(line)["request_id"]


@pytest.mark.parametrize("fault", ["is_broken", "breaks_batches"])
def test_failed_step_resets_its_stream_only(failing_server: Served, other: RawConnection, fault: str) -> None:
    assert other is not None
    address = f"{failing_server.address.replace('http', 'ws')}/models/gpt/decode"
    headers = {"X-Request-Id": "mine"}
    with connect_socket(address) as healthy, connect_socket(address, additional_headers=headers) as stream:
        for each in (healthy, stream):
            each.send(step_frame([1]))
            assert each.recv()
        setattr(failing_server.scheduler, fault, True)
        stream.send(step_frame([2]))
        with pytest.raises(ConnectionClosedError):
            stream.recv()
        setattr(failing_server.scheduler, fault, False)
        healthy.send(step_frame([2]))
        assert healthy.recv()
    (line,) = failing_server.lines
    assert vars(line)["request_id"] == "mine"
