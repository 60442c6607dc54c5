"""Metrics, access log lines and spans of every code path. Oracle: the sizes of requests and answers."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import DIRECT, PREBLOCK, CodePath, Servers
from tests.service.observability.collector import TRACE, Told, attributes, told_by
from tests.support.scrapes import read_metrics
from tests.support.servers import Server
from tests.support.waiting import wait_until

GOOD, BAD = np.array([[3, 4]]), np.array([[3, -1]])


def test_counters_increase_with_each_request(path: CodePath, caller: Caller, plain_servers: Servers) -> None:
    address = plain_servers[path.server].address
    path.prepare(caller, GOOD)
    time.sleep(0.01)
    before, began = read_metrics(address), time.perf_counter()
    sent, received = caller.ask(GOOD).sizes
    caller.ask(BAD)
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


@pytest.fixture(scope="module")
def told(wide_repository: Path) -> Told:
    """Return the log and the spans of one good and one bad request of every row of `preblock serve`."""

    def ask_everything(address: str, calls: str) -> None:
        servers = {PREBLOCK: Server(address, calls, 0, "")}
        for number, path in enumerate(DIRECT, 1):
            headers = {"x-request-id": path.name, "traceparent": f"00-{TRACE:032x}-{number:016x}-01"}
            with path.open(servers, headers) as caller:
                path.prepare(caller, GOOD)
                assert caller.ask(GOOD).status == 200
                assert caller.ask(BAD).status in (400, 422)

    return told_by(wide_repository, ask_everything, "--log-format", "json", "--access-log-sample-rate", "1")


@pytest.mark.parametrize("path", DIRECT, ids=lambda path: path.name)
def test_access_log_has_one_line_per_request(path: CodePath, told: Told) -> None:
    lines = [json.loads(line) for line in told.lines]
    protocol = "decode-open" if path.name == "events" else path.protocol  # one line for all events
    found = [line for line in lines if (line["request_id"], line["protocol"]) == (path.name, protocol)]
    good = 3 if path.known else 1
    assert sorted(line["outcome"] for line in found) == sorted(["Invalid", *["ok"] * good])
    assert {line["model"] for line in found} == {"gpt"}
    assert all(0 < line["seconds"] < 60 for line in found)
    assert {line["trace_id"] for line in found} == {f"{TRACE:032x}"}


@pytest.mark.parametrize("path", DIRECT, ids=lambda path: path.name)
def test_span_has_the_caller_as_parent(path: CodePath, told: Told) -> None:
    parent = (DIRECT.index(path) + 1).to_bytes(8, "big")
    spans = [attributes(span) for _, span in told.spans if span.parent_span_id == parent]
    assert len(spans) == (4 if path.known else 2)
    assert {span["preblock.protocol"] for span in spans} == {path.protocol}
    assert {span["preblock.model"] for span in spans} == {"gpt"}
    tokens = GOOD.size * path.repeat
    assert [span["preblock.tokens"] for span in spans if "error.type" not in span] == [tokens] * (len(spans) - 1)
