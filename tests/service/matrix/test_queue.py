"""Large requests of every code path on a server with one busy thread, needed to read them."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import PREBLOCK, CodePath
from tests.service.matrix.conftest import Rows
from tests.service.matrix.test_limits import check_retry
from tests.support.scrapes import read_metrics
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

LARGE = np.ones((60_000, 1), np.int64)
LARGE[-1] = -1  # refused after the read, without a large answer


@pytest.fixture(scope="module")
def busy(wide_repository: Path) -> Iterator[Server]:
    """Keep a server of one thread and a queue of one request busy."""
    body = {"model": "gpt", "input": [[0] * 700] * 20, "encoding_format": "base64", "pooling": "mean"}
    over = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            while not over.is_set():
                assert client.post("/v1/embeddings", json=body).status_code in (200, 503)

    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        try:
            os.sched_setaffinity(0, {min(cores)})
            server = stack.enter_context(serve(wide_repository, PREBLOCK_MAX_QUEUE_SIZE="1"))
        finally:
            os.sched_setaffinity(0, cores)
        assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200
        with ThreadPoolExecutor() as threads:
            loads = [threads.submit(load) for _ in range(3)]
            try:
                yield server
            finally:
                over.set()
        for each in loads:
            each.result()
        assert httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": [[1]]}).status_code == 200


def test_queue_depth_is_reported_in_metrics_and_readiness(busy: Server) -> None:
    wait_until(lambda: read_metrics(busy.address)["preblock_queue_depth",] >= 1)
    wait_until(lambda: httpx.get(f"{busy.address}/readyz", timeout=60).json()["queue_depth"] >= 1)


def test_large_request_is_rejected_by_full_queue(rows: Rows, busy: Server) -> None:
    """A large request is not prepared, so rows of such requests stand for all."""
    message = "the queue is full: 1 requests wait"
    for path in rows:
        if path.server == PREBLOCK and path.repeat == 1 and not path.known:
            with path.connect(busy, {}) as caller:

                def is_refused(path: CodePath = path, caller: Caller = caller) -> bool:
                    answer = caller.ask(LARGE)
                    if answer.status in (400, 422):  # the thread was free
                        return False
                    assert (answer.status, message in answer.message) == (503, True), answer
                    check_retry(path, answer)
                    return True

                wait_until(is_refused)
