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
from tests.service.core.test_auth import ENTRY
from tests.support.connections import dial
from tests.support.decode_protocols import step_frame
from tests.support.engines import live_settings
from tests.support.protocols import Clients, connect, grpc_raw, native_json, open_inference_json, openai_base64
from tests.support.scrapes import wait_for_streams
from tests.support.servers import Server, serve

PROTOCOLS = (native_json, open_inference_json, openai_base64, grpc_raw)
ONE = {"input_ids": [[1]]}
LINES, JSON = ({"Content-Type": f"application/{kind}"} for kind in ("x-ndjson", "json"))


@pytest.fixture(scope="module")
def strict(tiny_repository: Path) -> Iterator[Server]:
    """Serve with low limits."""
    limits = {
        "PREBLOCK_MAX_REQUEST_ROWS": "3",
        "PREBLOCK_MAX_CONCURRENT_REQUESTS": "1",
        "PREBLOCK_MAX_CONCURRENT_STREAMS": "2",
    }
    with serve(tiny_repository, **limits) as server:
        yield server


@pytest.fixture(scope="module")
def strict_clients(strict: Server) -> Iterator[Clients]:
    with connect(strict) as connected:
        yield connected


def test_rows_of_text_and_streams_over_limit_are_rejected(strict_clients: Clients) -> None:
    text = strict_clients.http.post("/models/bert/embed", json={"text": ["a"] * 4})
    assert (text.status_code, text.json()["field"]) == (413, "text")
    stream = strict_clients.http.post("/models/gpt/decode?rows=4", content=b"", headers=LINES)
    assert (stream.status_code, stream.json()["field"]) == (413, "rows")


def test_slow_small_body_does_not_block_other_requests(strict: Server, strict_clients: Clients) -> None:
    head = b"POST /models/gpt/embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n"
    with dial(strict.address) as half:
        half.sendall(head + b"{")
        time.sleep(0.1)
        assert strict_clients.http.post("/models/gpt/embed", json=ONE).status_code == 200
        half.sendall(b'"input_ids": [[1]]}')
        assert half.recv(12) == b"HTTP/1.1 200"


def test_stream_over_limit_is_rejected_at_every_protocol(strict: Server, strict_clients: Clients) -> None:
    address = f"{strict.socket}/models/gpt/decode"
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


@pytest.mark.parametrize("keys", [False, True], ids=["addresses", "keys"])
def test_rate_limit_counts_requests_of_every_protocol(tiny_repository: Path, tmp_path: Path, keys: bool) -> None:
    environment, headers = {"PREBLOCK_RATE_LIMIT_PER_SECOND": "0.05"}, {}
    if keys:
        (tmp_path / "keys.toml").write_text(ENTRY)
        environment["PREBLOCK_API_KEYS_FILE"] = str(tmp_path / "keys.toml")
        headers = {"authorization": "Bearer key"}
    request = service_pb2.ModelInferRequest(model_name="gpt")
    with serve(tiny_repository, **environment) as server, connect(server) as clients:
        clients.http.headers.update(headers)
        assert clients.http.post("/models/gpt/embed", json=ONE).status_code == 200
        refused = clients.http.post("/models/gpt/embed", json=ONE)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
        assert refused.json()["expected"] == "at most 0.05 a second"
        assert clients.http.post("/v1/embeddings", json={"model": "gpt", "input": [1]}).status_code == 429
        with pytest.raises(grpc.RpcError) as raised:
            clients.stub.ModelInfer(request, metadata=[*headers.items()])
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1 <= int(dict(raised.value.trailing_metadata())["retry-after"]) <= 20
        with (
            pytest.raises(InvalidStatus) as denied,
            connect_socket(f"{server.socket}/models/gpt/decode", additional_headers=headers),
        ):
            pass
        assert denied.value.response.status_code == 429
        assert "Retry-After" in denied.value.response.headers
        assert clients.http.get("/models").status_code == 200


def test_stream_step_counts_for_rate_of_caller(tiny_repository: Path) -> None:
    with (
        serve(tiny_repository, PREBLOCK_RATE_LIMIT_PER_SECOND="0.05") as server,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        stream.send(step_frame([1]))
        answer = stream.recv()
        assert isinstance(answer, bytes)
        told = [json.loads(answer[answer.index(b"{") :])]
        stream.send('{"input_ids": [1]}')
        told.append(json.loads(stream.recv())["error"])
        for error in told:
            assert (error["title"], error["status"]) == ("RateLimited", 429)
            assert 1 <= error["retry_after"] <= 20


def test_stream_step_over_request_limits_is_rejected(tiny_repository: Path) -> None:
    """Plain steps are answered in the connection, others are not."""
    with (
        serve(tiny_repository, "--max-request-tokens", "4", "--max-request-rows", "2") as server,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        for whole in (step_frame([1, 2, 3, 4, 5]), [step_frame([1, 2, 3, 4, 5])[:9], step_frame([1, 2, 3, 4, 5])[9:]]):
            stream.send(whole)
            answer = stream.recv()
            assert isinstance(answer, bytes)
            assert b"at most 4 tokens" in answer
        stream.send('{"append": [0]}')
        assert json.loads(stream.recv())["next_offset"] == [0, 0]
        stream.send('{"append": [0]}')
        assert json.loads(stream.recv())["error"]["expected"] == "at most 2 rows in a request"
        stream.send(step_frame([1, 2, 3, 4]))  # one row for a stream of two
        answer = stream.recv()
        assert isinstance(answer, bytes)
        assert b"2 rows" in answer


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


@pytest.mark.parametrize(
    ("per_second", "moments", "told"),
    [
        (1, [0, 0, 0.9, 1, 1.5, 5, 5], [None, 1, 1, None, 1, None, 1]),
        (10, [0] * 11, [None] * 10 + [1]),
        (10, [0] * 10 + [0.1, 0.1, 0.2], [None] * 11 + [1, None]),
        (0.5, [0, 0, 1.5, 2], [None, 2, 1, None]),
        (1.5, [0, 0, 0.4, 0.7], [None, 1, None, 1]),
    ],
)
def test_rate_limit_allows_its_number_per_second(
    per_second: float, moments: list[float], told: list[int | None]
) -> None:
    assert times(per_second, moments) == told


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
