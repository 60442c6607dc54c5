"""The file of settings, changed while a real server runs, and a visible effect of each setting."""

import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import shared_memory
from websockets import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_socket

from preblock.service.core.settings import RELOADABLE
from tests.service.server.test_websocket import step
from tests.support.artifacts import copy_artifact
from tests.support.connections import dial, http_request
from tests.support.open_inference import NO_LIMIT, infer_message, open_stub
from tests.support.processes import workers as workers_of
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

SECONDS = 30.0
ONE = {"input_ids": [[1]]}
LARGE = {"input_ids": [[1] * 8] * 2000, "encoding": "float"}
"""A request with an answer written by a thread."""


@dataclass(frozen=True)
class Served(Server):
    """A server and its file of settings."""

    file: Path

    def set(self, text: str) -> None:
        """Write the file anew, as a whole."""
        draft = self.file.with_suffix(".new")
        draft.write_text(text)
        draft.rename(self.file)

    def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        answer = httpx.post(f"{self.address}/models/gpt/embed", json=body, timeout=SECONDS)
        return answer.status_code, answer.text

    def refused(self, body: dict[str, Any], status: int, message: str) -> bool:
        found = self.ask(body)
        assert found[0] in (200, status)
        return found[0] == status and message in found[1]

    def said(self) -> str:
        """Return the log."""
        return Path(f"/proc/{self.pid}/fd/2").read_text()


@contextmanager
def served(models: Path, folder: Path, *options: str) -> Iterator[Served]:
    file = folder / "preblock.toml"
    file.write_text("")
    with serve(models, "--config-file", str(file), *options) as server:
        yield Served(server.address, server.grpc, server.pid, server.banner, file)


def stream(server: Served) -> ClientConnection:
    return connect_socket(f"{server.socket}/models/gpt/decode")


too_many_tokens = partial(
    Served.refused, body={"input_ids": [[1, 2, 3]]}, status=413, message="at most 2 tokens in a request"
)
too_many_rows = partial(
    Served.refused, body={"input_ids": [[1], [2]]}, status=413, message="at most 1 rows in a request"
)


def too_large(server: Served) -> bool:
    """Ask for 9 MB of vectors in one message of gRPC."""
    with open_stub(server.grpc, NO_LIMIT) as stub:
        try:
            answer = stub.ModelInfer(infer_message(np.zeros((9000, 1)), "wide"), timeout=SECONDS)
        except grpc.RpcError as error:
            return "at most 8388608 in a buffered response" in str(error.details())
    assert len(answer.raw_output_contents[0]) == 4 * 256 * 9000
    return False


def too_often(server: Served) -> bool:
    return any(server.refused(ONE, 429, "at most 2 a second") for _ in range(4))


def too_many_requests(server: Served) -> bool:
    head = http_request("/models/gpt/embed", headers={"Transfer-Encoding": "chunked"})
    with dial(server.address, SECONDS) as half:
        half.sendall(head + b"1\r\n{\r\n")
        time.sleep(0.1)
        return server.refused(ONE, 503, "the limit of 1 requests at a time")


def crowded(server: Served, message: str) -> bool:
    """Return whether one of many concurrent answers, written by threads, has the message."""
    with ThreadPoolExecutor(24) as pool:
        url = f"{server.address}/models/gpt/embed"
        return any(
            message in text for text in pool.map(lambda _: httpx.post(url, json=LARGE, timeout=SECONDS).text, range(24))
        )


def too_many_streams(server: Served) -> bool:
    with stream(server):
        try:
            with stream(server):
                return False
        except InvalidStatus as refused:
            return refused.response.status_code == 503


def comes_too_late(server: Served, begin: bytes) -> bool:
    with dial(server.address, 1.5) as half:
        half.sendall(begin)
        with suppress(TimeoutError):
            return b" 408 " in half.recv(100)
    return False


def ends(server: Served, reason: str) -> bool:
    """Open a stream, and return whether it soon ends for this reason."""
    with stream(server) as opened:
        try:
            opened.recv(1.5)
        except TimeoutError:
            return False
        except ConnectionClosed as closed:
            return closed.rcvd is not None and f'"{reason}"' in closed.rcvd.reason
        return False


def sequence(server: Served, rows: int = 1, pause: float | None = None) -> str:
    """Begin a sequence in a stream of gRPC, and return the last error; after a pause, feed it once more."""

    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        request = infer_message(np.zeros((rows, 1)))
        request.parameters["sequence_id"].int64_param = 7
        request.parameters["sequence_start"].bool_param = True
        yield request
        if pause is not None:
            time.sleep(pause)
            request.parameters["sequence_start"].bool_param = False
            yield request

    with open_stub(server.grpc) as stub:
        return str([*stub.ModelStreamInfer(requests(), timeout=SECONDS)][-1].error_message)


def a_region_expires(server: Served) -> bool:
    url = f"{server.address}/v2/systemsharedmemory"
    region = shared_memory.create_shared_memory_region("idle", f"preblock-idle-{server.pid}", 64)
    try:
        body = {"key": region._shm_key, "byte_size": 64}
        httpx.post(f"{url}/region/idle/register", json=body, timeout=SECONDS).raise_for_status()
        time.sleep(2.5)
        return not httpx.get(f"{url}/status", timeout=SECONDS).json()
    finally:
        httpx.post(f"{url}/unregister", timeout=SECONDS).raise_for_status()
        shared_memory.destroy_shared_memory_region(region)


def a_page_may_ask(server: Served) -> bool:
    origin = {"Origin": "https://pages.example"}
    answer = httpx.get(f"{server.address}/models", headers=origin, timeout=SECONDS)
    return bool(answer.headers.get("Access-Control-Allow-Origin") == origin["Origin"])


def logs(server: Served, text: str) -> bool:
    server.ask(ONE)
    return text in server.said()


TOO_MANY_ROWS = "the limit of 1 rows of sequences"
SEEN: dict[str, tuple[str, Callable[[Served], bool]]] = {
    "max_request_tokens": ("2", too_many_tokens),
    "max_request_rows": ("1", too_many_rows),
    "max_buffered_response_bytes": ("8388608", too_large),
    "max_concurrent_requests": ("1", too_many_requests),
    "rate_limit_per_second": ("2", too_often),
    "max_queue_size": ("1", partial(crowded, message="1 requests wait")),
    "queue_timeout_seconds": ("0.0001", partial(crowded, message="more than 0.0001 s in the queue")),
    "max_concurrent_streams": ("1", too_many_streams),
    "header_timeout_seconds": ("1", partial(comes_too_late, begin=b"GET / HTTP/1.1\r\n")),
    "body_timeout_seconds": ("1", partial(comes_too_late, begin=http_request("/models/gpt/embed", b"{}")[:-1])),
    "stream_idle_timeout_seconds": ("1", partial(ends, reason="idle")),
    "stream_max_lifetime_seconds": ("1", partial(ends, reason="time")),
    "sequence_idle_timeout_seconds": ("1", lambda server: "does not run on" in sequence(server, pause=1.5)),
    "shared_memory_idle_timeout_seconds": ("1", a_region_expires),
    "max_sequence_rows": ("1", lambda server: TOO_MANY_ROWS in sequence(server, 2)),
    "max_stream_sequence_rows": ("1", lambda server: TOO_MANY_ROWS in sequence(server, 2)),
    "cors_origins": ('"https://pages.example"', a_page_may_ask),
    "access_log_sample_rate": ("1.0", partial(logs, text="native gpt ok")),
    "access_log_max_token_ids": ("1", partial(logs, text=" ms [[")),
    "log_level": (
        '"debug"',
        partial(logs, text="INFO preblock.service.core.settings: settings reloaded: log_level = debug"),
    ),
}
"""A value for each reloadable setting, and a function to see its effect."""
TOGETHER = (
    ("max_request_tokens", "max_request_rows", "max_stream_sequence_rows", "cors_origins"),
    ("access_log_sample_rate", "access_log_max_token_ids"),
    ("max_concurrent_requests", "max_sequence_rows", "max_concurrent_streams", "log_level"),
    ("queue_timeout_seconds", "stream_max_lifetime_seconds", "shared_memory_idle_timeout_seconds"),
    ("max_queue_size", "max_buffered_response_bytes", "stream_idle_timeout_seconds"),
    ("header_timeout_seconds", "body_timeout_seconds", "sequence_idle_timeout_seconds"),
    ("rate_limit_per_second",),
)
"""Settings with effects independent of each other."""


REJECTED = "settings file rejected, keeping the previous settings"
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}


@pytest.fixture(scope="module")
def reloading(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("followed")
    models = shutil.copytree(tiny_repository, folder / "models")
    copy_artifact("gpt-7x256x6", models, "wide")
    with served(models, folder, "--max-shared-memory-bytes", "4096") as running:
        yield running


def test_tests_cover_every_reloadable_setting() -> None:
    assert set(SEEN) == {name for names in TOGETHER for name in names} == RELOADABLE


@pytest.mark.parametrize("names", TOGETHER)
def test_written_setting_takes_effect_and_reverts(reloading: Served, names: tuple[str, ...]) -> None:
    assert not any(SEEN[name][1](reloading) for name in names)
    reloading.set("".join(f"{name} = {SEEN[name][0]}\n" for name in names))
    for name in names:
        wait_until(lambda: SEEN[name][1](reloading))  # noqa: B023 - it is called at once
    reloading.set("")  # the defaults again
    for name in names:
        if "log_" not in name:  # logged lines stay
            wait_until(lambda: not SEEN[name][1](reloading))  # noqa: B023


def test_lowered_token_limit_rejects_fast_path_request(reloading: Served) -> None:
    """Prepared requests and simple steps follow new limits. No connection is dropped."""

    def ask() -> int:
        connection.request("POST", "/models/gpt/embed?shape=1,3", np.array([1, 2, 3]).tobytes(), BYTES)
        answer = connection.getresponse()
        answer.read()
        assert connection.sock.getsockname() == mine
        return answer.status

    with (
        closing(http.client.HTTPConnection(urlsplit(reloading.address).netloc, timeout=SECONDS)) as connection,
        stream(reloading) as opened,
    ):
        connection.connect()
        mine = connection.sock.getsockname()
        assert [ask() for _ in range(3)] == [200] * 3
        reloading.set("max_request_tokens = 2\n")
        wait_until(lambda: ask() == 413)
        opened.send(step([[1, 2, 3]]))  # the stream was opened before
        assert b'"status":413' in opened.recv(SECONDS, decode=False)
        reloading.set("")
        wait_until(lambda: ask() == 200)
        opened.send('{"input_ids": [1, 2, 3]}')
        assert json.loads(opened.recv(SECONDS))["next_offset"] == [3]


def test_invalid_settings_file_keeps_previous_settings(reloading: Served) -> None:
    """A setting that needs a restart is named; an option states the port."""
    reloading.set("port = 1\nmax_request_tokens = 2\nintra_op_threads = 3\nmax_body_bytes = 9\n")
    wait_until(lambda: too_many_tokens(reloading))
    wait_until(lambda: " intra_op_threads, max_body_bytes changed in " in reloading.said())  # a thread writes the log
    for text, message in (
        ("max_request_tokens = 0\n", "max_request_tokens in "),
        ("max_request_tokens = \n", "is not valid TOML"),
        (f"x = {'[' * 10_000}", "is not valid TOML"),
        ("max_toknes = 2\n", "no setting max_toknes; did you mean max_request_tokens?"),
    ):
        before = reloading.said().count(REJECTED)
        reloading.set(text)
        wait_until(lambda: reloading.said().count(REJECTED) == before + 1)  # noqa: B023 - it is called at once
        assert message in reloading.said().splitlines()[-1]
        assert too_many_tokens(reloading)
    reloading.set("")
    wait_until(lambda: not too_many_tokens(reloading))


def test_settings_reload_reaches_running_and_restarted_workers(tiny_repository: Path, tmp_path: Path) -> None:
    with served(tiny_repository, tmp_path, "--workers", "2") as server:
        server.set("max_request_tokens = 2\n")
        wait_until(lambda: too_many_tokens(server))
        time.sleep(2)  # the parent and the other worker have looked by now

        def statuses() -> set[int]:
            """Ask often enough for every worker."""
            return {server.ask({"input_ids": [[1, 2, 3]]})[0] for _ in range(20)}

        assert statuses() == {413}
        server.set("max_request_tokens = 0\n")
        time.sleep(3)
        assert server.said().count(REJECTED) == 1
        server.set("max_request_tokens = 2\n")
        for worker in workers_of(server.pid):
            before = set(workers_of(server.pid))
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda: len(workers_of(server.pid)) == 2 and set(workers_of(server.pid)) != before)  # noqa: B023
        assert statuses() == {413}
