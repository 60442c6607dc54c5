"""Servers with other settings than the shared ones, and several workers."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect as connect_socket

from preblock.service.observability.metrics import FLUSH_INTERVAL_SECONDS
from tests.support.connections import dial, http_request
from tests.support.open_inference import open_stub
from tests.support.paths import ROOT
from tests.support.processes import fork_servers, status_bytes, workers
from tests.support.scrapes import read_metrics, samples_of
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def two(tiny_repository: Path) -> Iterator[Server]:
    """A server of two workers."""
    with serve(tiny_repository, "--workers", "2") as server:
        yield server


def embed(server: Server, rows: list[list[int]], model: str = "bert") -> httpx.Response:
    """Ask over a connection of its own, which any worker accepts."""
    return httpx.post(f"{server.address}/models/{model}/embed", json={"input_ids": rows}, timeout=60)


def statistics(server: Server) -> tuple[int, int, int]:
    """Return the numbers of rows, of requests, and of runs of two rows."""
    (model,) = httpx.get(f"{server.address}/v2/models/bert/versions/2/stats", timeout=60).json()["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in model["batch_stats"]}
    return model["inference_count"], model["inference_stats"]["success"]["count"], sizes.get(2, 0)


def test_workers_answer_alike_and_sum_counters(two: Server) -> None:
    answers = set()
    for _ in range(20):
        answers.add(embed(two, [[1, 2], [3, 4]]).text)
        embed(two, [[11]])
    assert len(answers) == 1
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    samples = read_metrics(two.address)
    assert samples["preblock_requests_total", "bert", "ok", "native"] == 20
    assert samples["preblock_requests_total", "bert", "Invalid", "native"] == 20
    assert samples["preblock_tokens_total", "bert"] == 80
    assert samples["preblock_request_duration_seconds_count", "native"] == 40
    assert {statistics(two) for _ in range(6)} == {(40, 20, 20)}  # by any worker


def test_open_streams_gauge_is_summed_over_workers(two: Server) -> None:
    address = f"{two.socket}/models/gpt/decode"
    with connect_socket(address) as one, connect_socket(address) as other, connect_socket(address) as third:
        for stream in (one, other, third):
            stream.send('{"input_ids": [1]}')
            assert json.loads(stream.recv())["next_offset"] == [1]
        for _ in range(6):  # by any worker
            assert "preblock_streams_open 3.0" in httpx.get(f"{two.address}/metrics", timeout=60).text


def accepted(parent: int) -> list[int]:
    """Return how many sockets each worker of a server has open."""
    found = []
    for worker in workers(parent):
        with suppress(FileNotFoundError):  # descriptors come and go
            found.append(sum("socket:" in str(link.readlink()) for link in Path(f"/proc/{worker}/fd").iterdir()))
    return found


def kilobytes(pid: int, field: str) -> int:
    """Return a figure of the memory of a process."""
    return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition(f"\n{field}:")[2].split()[0])


def test_workers_share_imported_modules(two: Server) -> None:
    (server,) = fork_servers(two.pid)
    both = workers(two.pid)
    assert len(both) == 2
    for worker in both:
        httpx.get(f"{two.address}/readyz", timeout=60)
        assert kilobytes(worker, "Shared_Dirty") > 20_000  # of spawned processes, nothing is
    # The fork server has one thread.
    assert "Threads:\t1\n" in Path(f"/proc/{server}/status").read_text()


def test_parent_closes_models_once_workers_serve(model_repository: Path) -> None:
    """It would keep replaced versions open, and on a GPU take the memory of a worker."""
    with serve(model_repository, "--workers", "2") as server:

        def mapped(pid: int) -> bool:
            return "model.onnx.data" in Path(f"/proc/{pid}/maps").read_text()

        # The first worker makes the server ready; the other one may still open its models.
        wait_until(lambda: len(found := workers(server.pid)) == 2 and all(map(mapped, found)))
        wait_until(lambda: not mapped(server.pid))


def test_request_ids_are_unique_and_name_worker(two: Server) -> None:
    asked = [httpx.get(f"{two.address}/readyz", timeout=60).headers["X-Request-Id"] for _ in range(40)]
    assert len(set(asked)) == len(asked)
    assert len({name.partition("-")[0] for name in asked}) == 2


def test_workers_start_with_temp_folder_too_long_for_sockets(tiny_repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with serve(tiny_repository, "--workers", "2", TMPDIR=str(folder)) as server:
        assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200
        assert len(list(folder.iterdir())) == 1  # everything else
    assert list(folder.iterdir()) == []


def test_model_change_returns_after_all_workers_applied_it(tiny_repository: Path, tmp_path: Path) -> None:
    root, later = shutil.copytree(tiny_repository, tmp_path / "repository"), tmp_path / "2"
    (root / "bert/2").rename(later)
    options = "--workers", "2", "--model-control", "explicit", "--load-model", "*"
    with serve(root, *options) as server, ExitStack() as stack:
        httpx.get(f"{server.address}/readyz", timeout=60)
        while len(before := accepted(server.pid)) < 2:
            time.sleep(0.05)
        clients: list[httpx.Client] = []

        def each_has_some() -> bool:
            """Open four connections, and return whether each worker has some."""
            for _ in range(4):
                clients.append(stack.enter_context(httpx.Client(base_url=server.address, timeout=60)))
                assert clients[-1].get("/readyz").status_code == 200
            now = accepted(server.pid)
            return len(now) == 2 and all(new - old >= 3 for new, old in zip(now, before, strict=True))

        wait_until(each_has_some, 150)

        def check(model: str, expected: tuple[int, Any], *states: str) -> None:
            """Ask for a row over every connection once, and for the states of `bert`."""
            found = [client.post(f"/models/{model}/embed", json={"input_ids": [1]}) for client in clients]
            assert {(answer.status_code, answer.json().get("version")) for answer in found} == {expected}
            for client in clients:
                index = client.post("/v2/repository/index").json()
                assert [row["state"] for row in index if row["name"] == "bert"] == [*states]

        def change(verb: str) -> None:
            clients[0].post(f"/v2/repository/models/bert/{verb}").raise_for_status()

        check("bert", (200, 1), "READY")
        later.rename(root / "bert/2")
        change("load")
        check("bert", (200, 2), "READY", "READY")
        change("unload")
        check("bert", (404, None), "UNAVAILABLE", "UNAVAILABLE")
        check("gpt", (200, 1), "UNAVAILABLE", "UNAVAILABLE")
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            client.load_model("bert")
        check("bert", (200, 2), "READY", "READY")
        time.sleep(2 * FLUSH_INTERVAL_SECONDS)
        for http in clients:
            counted = http.get("/v2/models/bert/stats").json()["model_stats"]
            assert [row["inference_count"] for row in counted] == [len(clients), 2 * len(clients)]


def test_serve_accepts_ipv6_host(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--host", "::1") as server:
        assert server.address.startswith("http://[::1]:")
        assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200
        grpc = f"[::1]:{server.grpc.rpartition(':')[2]}"
        assert f"gRPC on {grpc}\n" in server.banner
        with open_stub(grpc) as stub:
            assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_right_after_banner_stops_server(tiny_repository: Path, tmp_path: Path, workers: str) -> None:
    for _ in range(2):
        with serve(tiny_repository, "--workers", workers, TMPDIR=str(tmp_path)):
            pass  # the end of `serving` sends the signal, and asks for exit code 0
    assert list(tmp_path.iterdir()) == []


def test_memory_and_byte_metrics_are_summed_over_workers(two: Server) -> None:
    """The same names as with one process, and the memory of both."""
    for _ in range(6):
        embed(two, [[1]], "gpt")
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    text = httpx.get(f"{two.address}/metrics").text
    documentation = (ROOT / "docs/reference/metrics.md").read_text()
    assert all(f"`{family.name}" in documentation for family in text_string_to_metric_families(text))
    found = samples_of(text)
    assert found["preblock_request_bytes_total", "native"] >= 6 * len('{"input_ids":[[1]]}')
    assert len([name for name, *_ in found if name == "preblock_provider_info"]) == 1
    largest = max(status_bytes(worker, "RssAnon") for worker in workers(two.pid))
    assert found["preblock_resident_memory_bytes", "anonymous"] > 1.5 * largest


def test_running_requests_gauge_excludes_dead_workers(two: Server) -> None:
    def running() -> set[float]:
        """Return the values of several scrapes, by any worker."""
        return {read_metrics(two.address)["preblock_requests_running", "native"] for _ in range(4)}

    with ExitStack() as stack:
        for _ in range(6):  # bodies over 256 KiB, of which only the beginning is sent
            connection = stack.enter_context(dial(two.address))
            connection.sendall(http_request("/models/gpt/embed", bytes(1_000_000))[:1000])
        wait_until(lambda: running() == {6})
        killed = workers(two.pid)
        for worker in killed:
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not set(killed) & set(workers(two.pid)))
        wait_until(lambda: running() == {0})
