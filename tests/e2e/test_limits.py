"""How much may be asked at once, and how often: each limit at a real server, by real clients."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2
from websockets import InvalidStatus
from websockets.sync.client import connect as connect_socket

from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import RateLimited, Unavailable
from preblock.service.engine.admission import Limits
from preblock.service.engine.scheduler import Scheduler
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.support.connections import dial, http_request
from tests.support.decode_protocols import step_frame
from tests.support.engines import live_settings
from tests.support.protocols import Clients, connect
from tests.support.scrapes import wait_for_streams
from tests.support.servers import serve

ONE = {"input_ids": [[1]]}
LINES, JSON = ({"Content-Type": f"application/{kind}"} for kind in ("x-ndjson", "json"))


@pytest.fixture(scope="module")
def strict_clients(tiny_repository: Path) -> Iterator[Clients]:
    """Connect to a server with low limits."""
    limits = {
        "PREBLOCK_MAX_REQUEST_ROWS": "3",
        "PREBLOCK_MAX_CONCURRENT_REQUESTS": "1",
        "PREBLOCK_MAX_CONCURRENT_STREAMS": "2",
    }
    with serve(tiny_repository, **limits) as server, connect(server) as connected:
        yield connected


def test_rows_of_text_and_streams_over_limit_are_rejected(strict_clients: Clients) -> None:
    text = strict_clients.http.post("/models/bert/embed", json={"text": ["a"] * 4})
    assert (text.status_code, text.json()["field"]) == (413, "text")
    stream = strict_clients.http.post("/models/gpt/decode?rows=4", content=b"", headers=LINES)
    assert (stream.status_code, stream.json()["field"]) == (413, "rows")


def test_slow_small_body_does_not_block_other_requests(strict_clients: Clients) -> None:
    body = b'{"input_ids": [[1]]}'
    with dial(strict_clients.http.base_url) as half:
        half.sendall(http_request("/models/gpt/embed", body)[:-19])
        time.sleep(0.1)
        assert strict_clients.http.post("/models/gpt/embed", json=ONE).status_code == 200
        half.sendall(body[-19:])
        assert half.recv(12) == b"HTTP/1.1 200"


def test_stream_over_limit_is_rejected_at_every_protocol(strict_clients: Clients) -> None:
    address = f"{strict_clients.socket}/models/gpt/decode"
    wait_for_streams(strict_clients.http, 0)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect_socket(address))
        with pytest.raises(InvalidStatus) as refused, connect_socket(address):
            pass
        answer = refused.value.response
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert json.loads(answer.body or b"")["got"] == "one more than 2"
        for body, headers in ((b"", LINES), (b'{"input_ids": [1]}', {"Content-Type": "application/json"})):
            accept = {"Accept": "application/x-ndjson" if headers is LINES else "text/event-stream"}
            http = strict_clients.http.post("/models/gpt/decode", content=body, headers=headers | accept)
            assert (http.status_code, http.headers.get("Retry-After")) == (503, "1")
        with pytest.raises(grpc.RpcError) as raised:
            list(strict_clients.stub.ModelStreamInfer(iter(())))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(raised.value.trailing_metadata())["retry-after"] == "1"
    wait_for_streams(strict_clients.http, 0)
    with connect_socket(address) as stream:
        stream.send('{"input_ids": [1]}')
        assert json.loads(stream.recv())["next_offset"] == [1]


def test_rate_limit_counts_requests_of_every_protocol(tiny_repository: Path) -> None:
    """A stream counts as a request, and so does each of its steps; other requests than to a model do not count."""
    waits = []
    with (
        serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.05") as server,
        connect(server) as clients,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        for step in (step_frame([1]), '{"input_ids": [1]}'):
            stream.send(step)
            answer = stream.recv()
            problem = (
                json.loads(answer)["error"] if isinstance(answer, str) else json.loads(answer[answer.index(b"{") :])
            )
            assert (problem["title"], problem["status"]) == ("RateLimited", 429)
            waits.append(problem["retry_after"])
        refused = clients.http.post("/models/gpt/embed", json=ONE)
        assert (refused.status_code, refused.json()["expected"]) == (429, "at most 0.05 a second")
        openai = clients.http.post("/v1/embeddings", json={"model": "gpt", "input": [1]})
        assert openai.status_code == 429
        waits += [answer.headers["Retry-After"] for answer in (refused, openai)]
        with pytest.raises(grpc.RpcError) as raised:
            clients.stub.ModelInfer(service_pb2.ModelInferRequest(model_name="gpt"))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waits.append(dict(raised.value.trailing_metadata())["retry-after"])
        with pytest.raises(InvalidStatus) as denied, connect_socket(f"{server.socket}/models/gpt/decode"):
            pass
        assert denied.value.response.status_code == 429
        waits.append(denied.value.response.headers["Retry-After"])
        assert clients.http.get("/models").status_code == 200
    assert all(1 <= int(wait) <= 20 for wait in waits), waits


def test_stream_step_over_request_limits_is_rejected(tiny_repository: Path) -> None:
    """Plain steps are answered in the connection, others are not."""
    with (
        serve(tiny_repository, "--max-request-tokens", "4", "--max-request-rows", "2") as server,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        long = step_frame([1, 2, 3, 4, 5])
        for sent, expected in (
            (long, "at most 4 tokens in a request"),
            ([long[:9], long[9:]], "at most 4 tokens in a request"),
            ('{"append": [0]}', '"next_offset":[0,0]'),
            ('{"append": [0]}', "at most 2 rows in a request"),
            (step_frame([1, 2, 3, 4]), "2 rows"),  # one row for a stream of two
        ):
            stream.send(sent)
            answer = stream.recv()
            assert expected in (answer if isinstance(answer, str) else answer.decode(errors="replace")), sent


def test_rejected_request_does_not_count_for_rate() -> None:
    limits = Limits(live_settings(max_concurrent_requests=1, rate_limit_per_second=10))
    limits.enter()
    for _ in range(50):
        with pytest.raises(Unavailable):
            limits.enter()
    limits.leave()
    for _ in range(9):
        limits.enter()
        limits.leave()


def times(per_second: float, moments: list[float]) -> list[int | None]:
    """Return `retry_after` for requests at these moments, None for an accepted one."""
    limits, found = Limits(live_settings()), list[int | None]()
    for moment in moments:
        try:
            limits._count("one", per_second, 1000 + moment)
            found.append(None)
        except RateLimited as error:
            found.append(error.retry_after)
    return found


def test_rate_limit_allows_its_number_per_second() -> None:
    cases: list[tuple[float, list[float], list[int | None]]] = [
        (1, [0, 0, 0.9, 1, 1.5, 5, 5], [None, 1, 1, None, 1, None, 1]),
        (10, [0] * 10 + [0.1, 0.1, 0.2], [None] * 11 + [1, None]),
        (0.5, [0, 0, 1.5, 2], [None, 2, 1, None]),
        (1.5, [0, 0, 0.4, 0.7], [None, 1, None, 1]),
    ]
    for per_second, moments, told in cases:
        assert times(per_second, moments) == told, per_second


def test_raised_rate_limit_shortens_wait() -> None:
    settings = live_settings(rate_limit_per_second=0.001)
    limits = Limits(settings)
    limits.enter()
    with pytest.raises(RateLimited):
        limits.enter()
    settings.use(live_settings(rate_limit_per_second=1000).current)
    with pytest.raises(RateLimited) as refused:
        limits.enter()
    assert refused.value.retry_after == 1
    time.sleep(0.01)
    limits.enter()


def test_rate_limiter_counts_per_caller_and_forgets_old_ones() -> None:
    limits, access = Limits(live_settings(rate_limit_per_second=1)), Authenticator()

    def ask(address: str) -> None:
        access.identify(address)
        limits.enter()
        limits.leave()

    for number in range(1000):
        copy_context().run(ask, f"10.0.0.{number}")  # a context of its own, as each request has one
    with pytest.raises(RateLimited):
        copy_context().run(ask, "10.0.0.999")
    limits._count("late", 1, time.monotonic() + 60)
    assert list(limits._arrivals) == ["late"]


def test_work_past_queue_timeout_never_runs() -> None:
    gate, ran = threading.Event(), list[int]()

    async def scenario() -> None:
        scheduler = Scheduler(1, live_settings(queue_timeout_seconds=0.1))
        first = asyncio.create_task(scheduler.run(INLINE_MAX_VALUES + 1, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=r"the request waited more than 0\.1 s in the queue") as refused:
            await scheduler.run(INLINE_MAX_VALUES + 1, lambda: ran.append(1))
        assert refused.value.retry_after == 1
        left = asyncio.create_task(scheduler.run(INLINE_MAX_VALUES + 1, lambda: ran.append(2)))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asyncio.sleep(0.2)  # running work has no limit
        gate.set()
        assert await first is True
        result: Any = await scheduler.run(INLINE_MAX_VALUES + 1, lambda: 3)
        assert result == 3
        scheduler.close()

    asyncio.run(scenario())
    assert ran == []
