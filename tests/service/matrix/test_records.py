"""Metrics, access log lines and spans of every code path. Oracle: the sizes of requests and answers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import PREBLOCK, CodePath, Servers
from tests.service.matrix.conftest import Rows, serve_rows
from tests.service.observability.collector import TRACE, attributes, told_by
from tests.support.scrapes import read_metrics
from tests.support.servers import Server
from tests.support.waiting import wait_until

GOOD, WRONG = np.array([[3, 4]]), np.array([[3, -1]])


@pytest.fixture(scope="module")
def counted_servers(rows: Rows, wide_repository: Path) -> Iterator[Servers]:
    """Serve with counters that only these tests change."""
    with serve_rows(rows, wide_repository) as servers:
        yield servers


def test_counters_increase_with_each_request(path: CodePath, counted_servers: Servers) -> None:
    with path.open(counted_servers) as caller:
        check_counters(path, caller, counted_servers[path.server].address)


def check_counters(path: CodePath, caller: Caller, address: str) -> None:
    path.prepare(caller, GOOD)
    time.sleep(0.01)
    before, began = read_metrics(address), time.perf_counter()
    sent, received = caller.ask(GOOD).sizes
    caller.ask(WRONG)
    seconds = time.perf_counter() - began
    expected = {
        ("preblock_requests_total", "gpt", "ok", path.protocol): 1,
        ("preblock_requests_total", "gpt", "Invalid", path.protocol): 1,
        ("preblock_tokens_total", "gpt"): GOOD.size * path.repeat,
        ("preblock_request_duration_seconds_count", path.protocol): 2,
    }
    moved: dict[tuple[str, ...], float] = {}

    def is_counted() -> bool:
        now = read_metrics(address)
        moved.update({name: value - before.get(name, 0) for name, value in now.items()})
        return all(moved.get(name, 0) == value for name, value in expected.items())

    wait_until(is_counted, 10)
    for kind, size in (("request", sent), ("response", received)):
        assert moved[f"preblock_{kind}_bytes_total", path.protocol] >= size > 0
    decoded = {name[1]: value for name, value in moved.items() if name[0] == "preblock_request_decode_seconds_total"}
    assert 0 < decoded.pop(path.protocol) < seconds
    assert set(decoded.values()) <= {0}


def test_log_and_spans_tell_every_request(rows: Rows, wide_repository: Path) -> None:
    direct = [path for path in rows if path.server == PREBLOCK]

    def ask_everything(address: str, calls: str) -> None:
        servers = {PREBLOCK: Server(address, calls, 0, "")}
        for number, path in enumerate(direct, 1):
            headers = {"x-request-id": path.name, "traceparent": f"00-{TRACE:032x}-{number:016x}-01"}
            with path.open(servers, headers) as caller:
                path.prepare(caller, GOOD)
                assert caller.ask(GOOD).status == 200
                assert caller.ask(WRONG).status in (400, 422)

    told = told_by(wide_repository, ask_everything, "--log-format", "json", "--access-log-sample-rate", "1")
    lines = [json.loads(line) for line in told.lines]
    for number, path in enumerate(direct, 1):
        good = 3 if path.known else 1
        check_lines(path, good, lines)
        parent = number.to_bytes(8, "big")
        check_spans(path, good, [attributes(span) for _, span in told.spans if span.parent_span_id == parent])


def check_lines(path: CodePath, good: int, lines: list[Any]) -> None:
    protocol = "decode-open" if path.name == "events" else path.protocol  # one line for all events
    found = [line for line in lines if (line["request_id"], line["protocol"]) == (path.name, protocol)]
    assert sorted(line["outcome"] for line in found) == sorted(["Invalid", *["ok"] * good]), path
    assert {(line["model"], line["trace_id"]) for line in found} == {("gpt", f"{TRACE:032x}")}


def check_spans(path: CodePath, good: int, spans: list[dict[str, Any]]) -> None:
    assert {(span["preblock.protocol"], span["preblock.model"]) for span in spans} == {(path.protocol, "gpt")}
    tokens = GOOD.size * path.repeat
    assert [span.get("preblock.tokens") for span in spans if "error.type" not in span] == [tokens] * good, path
    assert len(spans) == good + 1, path
