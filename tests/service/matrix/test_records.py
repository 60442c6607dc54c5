"""Metrics of every code path. Oracle: the sizes of requests and answers."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import CodePath, Servers
from tests.service.matrix.conftest import Rows, serve_rows
from tests.support.scrapes import read_metrics
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
