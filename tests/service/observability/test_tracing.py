"""Traces of real servers, sent to a collector in this process with the messages of OpenTelemetry.

Oracles: the requests, the answers and the clocks of the clients.
"""

import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from preblock.service.core.auth import new_key
from tests.cli.command_line import failing
from tests.service.observability.collector import (
    BYTES,
    EMBED,
    INFER,
    MANY,
    STREAM,
    TRACE,
    Told,
    ask_everything,
    attributes,
    call,
    parent,
    told_by,
)
from tests.service.server.test_repeated_heads import request as same_head
from tests.support.connections import RawConnection
from tests.support.open_inference import open_stub
from tests.support.servers import free_port, serve
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def told(tiny_repository: Path) -> Told:
    """Return spans and log of requests by every protocol."""
    options = "--max-concurrent-streams", "1", "--log-format", "json", "--access-log-sample-rate", "1"
    with ExitStack() as left_open:
        return told_by(tiny_repository, partial(ask_everything, left_open), *options)


def test_every_request_has_one_server_span(told: Told) -> None:
    for _, span in told.spans:
        assert span.kind == Span.SPAN_KIND_SERVER
        assert time.time() - 300 < span.start_time_unix_nano / 1e9 <= span.end_time_unix_nano / 1e9 < time.time()
    assert [resource["service.name"] for resource in told.resources] == ["preblock"]
    assert told.resources[0]["service.version"]
    parents = sorted(int.from_bytes(span.parent_span_id, "big") for _, span in told.spans)
    assert parents == [0, 0, 0, 0, 1, 3, 5, 6, 7, 10, *range(12, 18), 19]
    children = [span for _, span in told.spans if span.parent_span_id]
    assert {span.trace_id for span in children} == {TRACE.to_bytes(16, "big")}
    assert len({span.trace_id for _, span in told.spans}) == 5
    assert [told.of(span).trace_state for span in (1, 3, 10, 15)] == ["vendor=told", "", "", "vendor=told"]


NATIVE, DECODE = ({"protocol": protocol, "model": "gpt"} for protocol in ("native", "decode"))
STEPS = "GET /models/gpt/decode"


@pytest.mark.parametrize(
    ("parent", "name", "expected"),
    [
        (1, f"POST {EMBED}", {"rows": 2, "tokens": 4, "request_id": "native-1"} | NATIVE),
        (3, f"POST {EMBED}", {"rows": 2000, "tokens": 6000} | NATIVE),
        (5, "POST /models/gpt/versions/1/embed", {"status": 422, "error.type": "Invalid"} | NATIVE),
        (6, "GET /models/gpt", {}),
        (7, "GET", {"status": 404, "error.type": "404"}),
        (12, "POST /models/gpt/decode", {"rows": 3, "tokens": 3, "steps": 3} | DECODE),
        (13, STEPS, {"rows": 4, "tokens": 4, "steps": 4, "status": 101, "error.type": "Invalid"} | DECODE),
        (19, STEPS, {"rows": 1, "tokens": 1, "steps": 1, "status": 101} | DECODE),  # the end of the service closed it
        (14, STEPS, {"status": 503, "error.type": "Unavailable", "steps": 0} | DECODE),
        (15, INFER, {"protocol": "grpc", "model": "gpt", "rows": 1, "tokens": 1}),
        (16, INFER, {"protocol": "grpc", "status": "NOT_FOUND", "error.type": "NotFound"}),
        (17, STREAM, {"protocol": "grpc-stream", "model": "gpt", "rows": 6, "tokens": 6, "steps": 3}),
    ],
)
def test_span_has_attributes_of_its_request(told: Told, parent: int, name: str, expected: dict[str, Any]) -> None:
    span = told.of(parent)
    found = attributes(span)
    if name.startswith("inference"):
        assert span.name == name
        assert (found.pop("rpc.system.name"), found.pop("rpc.method")) == ("grpc", name)
        assert found.pop("rpc.response.status_code") == expected.pop("status", "OK")
    else:
        method, _, path = name.partition(" ")
        route = path.replace("/gpt", "/{name}").replace("/1/", "/{version}/")
        assert span.name == f"{method} {route}".strip()
        assert found.pop("http.request.method") == method
        assert found.pop("url.path") == (path or "/nowhere")
        assert found.pop("url.scheme") == ("ws" if parent in (13, 14, 19) else "http")
        assert found.pop("http.route", "") == route
        assert found.pop("http.response.status_code") == expected.pop("status", 200)
    assert found.pop("error.type", None) == expected.pop("error.type", None)
    assert span.status.code == (Status.STATUS_CODE_ERROR if parent == 14 else Status.STATUS_CODE_UNSET)
    stages = [found.pop(f"preblock.{stage}_seconds", None) for stage in ("parse", "queue", "run", "send")]
    if "rows" in expected and "steps" not in expected:
        assert all(seconds >= 0 for seconds in stages)
        assert sum(stages) <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    else:
        assert stages == [None] * 4
    request = found.pop("preblock.request_id")
    assert request == expected.pop("request_id", request)
    assert found == {f"preblock.{name}": value for name, value in expected.items()}


def test_log_lines_name_their_trace(told: Told) -> None:
    lines = [json.loads(line) for line in told.lines]
    assert {line["logger"] for line in lines} == {"preblock.requests"}  # and no warning of a malformed header
    traces = {attributes(span)["preblock.request_id"]: span.trace_id.hex() for _, span in told.spans}
    assert {line["request_id"] for line in lines} >= {"native-1", "alone"}
    assert [line["trace_id"] for line in lines] == [traces[line["request_id"]] for line in lines]


def test_each_worker_sends_spans_including_rejected_requests(tiny_repository: Path, tmp_path: Path) -> None:
    key, entry = new_key("alice", (), False)
    (tmp_path / "keys.toml").write_text(entry)
    asked: list[str] = []

    def ask(address: str, calls: str) -> None:
        with open_stub(calls) as stub:
            assert call(stub, "gpt", **parent(1)) == "UNAUTHENTICATED"
            assert call(stub, "gpt", **parent(2), authorization=f"Bearer {key}") == "OK"
        assert httpx.post(f"{address}{EMBED}", headers=parent(3)).status_code == 401
        body, authorized = {"input_ids": [[1]]}, {"Authorization": f"Bearer {key}"}

        def is_seen_from_both_workers() -> bool:
            answer = httpx.post(f"{address}{EMBED}", json=body, headers=authorized, timeout=30)  # a connection each
            assert answer.is_success
            asked.append(answer.headers["X-Request-Id"])
            return len({name.partition("-")[0] for name in asked}) == 2  # ids of a worker have the same start

        wait_until(is_seen_from_both_workers, 60)

    told = told_by(
        tiny_repository,
        ask,
        *("--workers", "2", "--api-keys-file", str(tmp_path / "keys.toml")),
        OTEL_SERVICE_NAME="mine",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    assert len(told.spans) == 3 + len(asked)
    assert len({instance for instance, _ in told.spans}) == 2
    assert {(r["service.name"], r["deployment.environment.name"]) for r in told.resources} == {("mine", "test")}
    assert [attributes(told.of(span)).get("error.type") for span in (1, 2, 3)] == ["UNAUTHENTICATED", None, "401"]
    assert key not in str(told.spans)


def test_span_has_the_scheme_that_a_trusted_proxy_names(tiny_repository: Path) -> None:
    """On the prepared path, the direct path and ASGI. A propagator whose package is missing is ignored."""

    def ask(address: str, _: str) -> None:
        secure = {"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.1"}
        with RawConnection(address) as connection:
            for headers in ({}, {}, parent(1), parent(2) | secure):
                assert connection.ask(same_head(1, 2, **headers))[0] == 200
        with httpx.Client(base_url=address, timeout=30) as http:
            path = f"{EMBED}?shape=2000,3"
            assert http.post(path, content=MANY.tobytes(), headers=BYTES | parent(3) | secure).is_success
            assert http.get("/models", headers=parent(4) | secure).is_success

    told = told_by(tiny_repository, ask, *("--trusted-proxies", "127.0.0.1"), OTEL_PROPAGATORS="tracecontext,b3")
    schemes = [attributes(told.of(number))["url.scheme"] for number in range(1, 5)]
    assert schemes == ["http", "https", "https", "https"]
    assert len({span.trace_id for _, span in told.spans}) == 3  # two of them without a parent


def test_only_sampled_spans_are_sent_but_all_have_trace_ids(tiny_repository: Path) -> None:
    def ask(address: str, _: str) -> None:
        with RawConnection(address) as connection:
            assert [connection.ask(same_head(1, 2))[0] for _ in range(100)] == [200] * 100

    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    told = told_by(tiny_repository, ask, "--access-log-sample-rate", "1", "--log-format", "json", **sampler)
    traces = [json.loads(line)["trace_id"] for line in told.lines]
    # Chosen by the 64 low bits of the id, as OpenTelemetry has it for Python.
    assert [span.trace_id.hex() for _, span in told.spans] == [id_ for id_ in traces if int(id_[16:], 16) < 2**62]
    assert (len(set(traces)), 5 < len(told.spans) < 60) == (100, True)


def test_missing_collector_delays_shutdown_by_seconds(tiny_repository: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with serve(
        tiny_repository,
        *("--tracing", "otlp"),
        OTEL_EXPORTER_OTLP_ENDPOINT=nowhere,
        OTEL_EXPORTER_OTLP_TIMEOUT="60",
    ) as server:
        assert httpx.get(f"{server.address}/models").status_code == 200
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_unsupported_exporter_is_rejected(tiny_repository: Path) -> None:
    for workers, name, value, expected in (
        ("1", "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("2", "OTEL_TRACES_EXPORTER", "console", "otlp"),
    ):
        options = "--repository", tiny_repository, "--port", "0", "--tracing", "otlp", "--workers", workers
        message = failing("serve", *options, code=1, **{name: value})
        assert message == f"{name}: got {value}, expected {expected}, or nothing"
