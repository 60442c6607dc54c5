"""Metrics, access log lines and spans of every code path. Oracle: the sizes of requests and answers."""

import json
import time
from typing import Any, cast

import httpx
import numpy as np
import pytest

from tests.service.matrix.code_paths import PATHS, Caller, CodePath
from tests.service.observability.test_tracing import TRACE, Told, attributes, told_by
from tests.support.servers import Server

GOOD, BAD = np.array([[3, 4]]), np.array([[3, -1]])


def read_counters(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    samples = (line.rpartition(" ") for line in lines if "_total{" in line)
    return {name: float(value) for name, _, value in samples}


def test_counters_move_by_each_request(path: CodePath, caller: Caller, plain_server: Server) -> None:
    path.prepare(caller, GOOD)
    time.sleep(0.01)
    before = read_counters(plain_server)
    sent, received = caller.ask(GOOD).sizes
    caller.ask(BAD)
    request = f'preblock_requests_total{{model="gpt",outcome="%s",protocol="{path.protocol}"}}'
    expected = {
        request % "ok": 1,
        request % "Invalid": 1,
        'preblock_tokens_total{model="gpt"}': GOOD.size * path.repeat,
    }
    deadline = time.monotonic() + 10
    while True:
        now = read_counters(plain_server)
        moved = {name: now.get(name, 0) - before.get(name, 0) for name in expected}
        if moved == expected:
            break
        assert time.monotonic() < deadline, moved
    for kind, size in (("request", sent), ("response", received)):
        name = f'preblock_{kind}_bytes_total{{protocol="{path.protocol}"}}'
        assert now[name] - before.get(name, 0) >= size > 0


@pytest.fixture(scope="module")
def told(models: Any) -> Told:
    """Return the log and the spans of one good and one bad request of every row."""

    def ask_everything(address: str, calls: str) -> None:
        server = Server(address, calls, cast(Any, None), "")
        for number, path in enumerate(PATHS, 1):
            headers = {"x-request-id": path.name, "traceparent": f"00-{TRACE:032x}-{number:016x}-01"}
            with path.open(server, headers) as caller:
                path.prepare(caller, GOOD)
                assert caller.ask(GOOD).status == 200
                assert caller.ask(BAD).status == 422

    return told_by(models, ask_everything, "--log-format", "json", "--access-log-sample-rate", "1")


def test_access_log_has_a_line_for_each_request(path: CodePath, told: Told) -> None:
    lines = [json.loads(line) for line in told.lines]
    protocol = "decode-open" if path.name == "events" else path.protocol  # one line for all events
    found = [line for line in lines if (line["request_id"], line["protocol"]) == (path.name, protocol)]
    good = 3 if path.known else 1
    assert sorted(line["outcome"] for line in found) == sorted(["Invalid", *["ok"] * good])
    assert {line["model"] for line in found} == {"gpt"}
    assert all(0 < line["seconds"] < 60 for line in found)
    assert {line["trace_id"] for line in found} == {f"{TRACE:032x}"}


def test_span_has_the_caller_as_parent(path: CodePath, told: Told) -> None:
    parent = (PATHS.index(path) + 1).to_bytes(8, "big")
    spans = [attributes(span) for _, span in told.spans if span.parent_span_id == parent]
    assert len(spans) == (4 if path.known else 2)
    assert {span["preblock.protocol"] for span in spans} == {path.protocol}
    assert {span["preblock.model"] for span in spans} == {"gpt"}
    tokens = GOOD.size * path.repeat
    assert [span["preblock.tokens"] for span in spans if "error.type" not in span] == [tokens] * (len(spans) - 1)
