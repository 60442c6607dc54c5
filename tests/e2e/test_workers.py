"""Servers with other settings than the shared ones, and several workers."""

import json
import os
import shutil
import signal
import socket
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

from preblock.service.core.errors import Invalid
from preblock.service.observability.metrics import FLUSH_INTERVAL_SECONDS
from preblock.service.server.addresses import bind
from tests.support.open_inference import OWN_CONNECTION, open_stub
from tests.support.paths import ROOT
from tests.support.processes import fork_servers, status_bytes, workers
from tests.support.protocols import Clients, RequestRefused, connect, grpc_raw
from tests.support.scrapes import read_metrics, samples_of
from tests.support.servers import Server, in_use, serve
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def limited(tiny_repository: Path) -> Iterator[Clients]:
    """Serve with limits set by the environment."""
    with (
        serve(tiny_repository, PREBLOCK_MAX_REQUEST_TOKENS="4", PREBLOCK_MAX_BODY_BYTES="200") as server,
        connect(server) as clients,
    ):
        yield clients


@pytest.fixture(scope="module")
def two(tiny_repository: Path) -> Iterator[Server]:
    """A server of two workers."""
    with serve(tiny_repository, "--workers", "2") as server:
        yield server


@pytest.mark.parametrize("path", ["/models/gpt/embed", "/v2/models/gpt/infer"])
def test_body_over_limit_of_environment_returns_413(limited: Clients, path: str) -> None:
    response = limited.http.post(path, content=bytes(201))
    assert response.status_code == 413
    assert "body: got 201 bytes, expected at most 200 bytes" in response.text


def test_grpc_message_over_limit_of_environment_is_rejected(limited: Clients) -> None:
    with pytest.raises(RequestRefused, match="RESOURCE_EXHAUSTED"):
        grpc_raw(limited, "gpt", {"input_ids": [[1] * 30]})


def test_workers_return_equal_vectors_and_sum_counters(two: Server) -> None:
    answers = set()
    for _ in range(20):  # a connection each, for both workers
        answers.add(httpx.post(f"{two.address}/models/bert/embed", json={"input_ids": [1, 2, 3]}, timeout=60).text)
        httpx.post(f"{two.address}/models/bert/embed", json={"input_ids": [11]}, timeout=60)
    assert len(answers) == 1
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    samples = read_metrics(two.address)
    assert samples["preblock_requests_total", "bert", "ok", "native"] == 20
    assert samples["preblock_requests_total", "bert", "Invalid", "native"] == 20
    assert samples["preblock_tokens_total", "bert"] == 60
    assert samples["preblock_request_duration_seconds_count", "native"] == 40


def test_open_streams_gauge_is_summed_over_workers(two: Server) -> None:
    address = f"{two.socket}/models/gpt/decode"
    with connect_socket(address) as one, connect_socket(address) as other, connect_socket(address) as third:
        for stream in (one, other, third):
            stream.send('{"input_ids": [1]}')
            assert json.loads(stream.recv())["next_offset"] == [1]
        for _ in range(6):  # by any worker
            assert "preblock_streams_open 3.0" in httpx.get(f"{two.address}/metrics", timeout=60).text


def test_model_statistics_are_summed_over_workers(two: Server) -> None:
    def read() -> tuple[int, int, int]:
        (model,) = httpx.get(f"{two.address}/v2/models/bert/versions/2/stats", timeout=60).json()["model_stats"]
        sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in model["batch_stats"]}
        return model["inference_count"], model["inference_stats"]["success"]["count"], sizes.get(2, 0)

    httpx.post(f"{two.address}/models/bert/embed", json={"input_ids": [1]}, timeout=60)
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    before = read()
    for _ in range(20):  # a connection each, for both workers
        httpx.post(f"{two.address}/models/bert/embed", json={"input_ids": [[1], [2]]}, timeout=60)
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    found = {read() for _ in range(6)}  # by any worker
    assert found == {(before[0] + 40, before[1] + 20, before[2] + 20)}


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
    with (
        serve(root, "--workers", "2", "--model-control", "explicit", "--load-model", "*") as server,
        ExitStack() as stack,
    ):
        httpx.get(f"{server.address}/readyz", timeout=60)
        while len(before := accepted(server.pid)) < 2:
            time.sleep(0.05)
        deadline = time.monotonic() + 150
        clients: list[httpx.Client] = []
        while True:  # until each worker has some of the open connections
            for _ in range(4):
                clients.append(stack.enter_context(httpx.Client(base_url=server.address, timeout=60)))
                assert clients[-1].get("/readyz").status_code == 200
            now = accepted(server.pid)
            if len(now) == len(before) == 2 and all(new - old >= 3 for new, old in zip(now, before, strict=True)):
                break
            assert time.monotonic() < deadline, (before, now)

        def ask(model: str = "bert") -> set[tuple[int, Any]]:
            """Ask over every connection once, for a row, and return status and version."""
            found = [client.post(f"/models/{model}/embed", json={"input_ids": [1]}) for client in clients]
            return {(answer.status_code, answer.json().get("version")) for answer in found}

        def change(verb: str) -> None:
            clients[0].post(f"/v2/repository/models/bert/{verb}").raise_for_status()

        def index() -> set[tuple[tuple[str, str, str], ...]]:
            """Return the repository index of every worker."""
            answers = [client.post("/v2/repository/index").json() for client in clients]
            return {tuple((m["name"], m["version"], m["state"]) for m in answer) for answer in answers}

        gpt = ("gpt", "1", "READY")
        assert ask() == {(200, 1)}
        later.rename(root / "bert/2")
        change("load")
        assert ask() == {(200, 2)}
        assert index() == {(("bert", "1", "READY"), ("bert", "2", "READY"), gpt)}
        change("unload")
        assert ask() == {(404, None)}
        assert index() == {(("bert", "1", "UNAVAILABLE"), ("bert", "2", "UNAVAILABLE"), gpt)}
        assert ask("gpt") == {(200, 1)}
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            client.load_model("bert")
        assert ask() == {(200, 2)}
        assert index() == {(("bert", "1", "READY"), ("bert", "2", "READY"), gpt)}
        time.sleep(2 * FLUSH_INTERVAL_SECONDS)
        counted = {
            tuple(
                (m["version"], m["inference_count"]) for m in client.get("/v2/models/bert/stats").json()["model_stats"]
            )
            for client in clients
        }
        assert counted == {(("1", len(clients)), ("2", 2 * len(clients)))}


def test_grpc_responses_of_all_workers_are_equal(two: Server) -> None:
    httpx.get(f"{two.address}/readyz", timeout=60)
    answers = set()
    for _ in range(10):  # a connection each
        with open_stub(two.grpc, OWN_CONNECTION) as stub:
            answers.add(stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="bert")).SerializeToString())
    assert len(answers) == 1


def test_bind_to_used_port_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Invalid, match=f"^{in_use(port, 'grpc-port')}$") as error:
            bind("grpc-port", "127.0.0.1", port)
        assert error.value.field == "grpc-port"


def test_bind_to_unknown_host_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"^the host no\.such\.host\.invalid is unknown: name or service not known$"):
        bind("port", "no.such.host.invalid", 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_serve_accepts_ipv4_and_ipv6_host(tiny_repository: Path, host: str) -> None:
    with serve(tiny_repository, "--host", host) as server:
        written = f"[{host}]" if ":" in host else host
        assert server.address.startswith(f"http://{written}:")
        assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200
        grpc = f"{written}:{server.grpc.rpartition(':')[2]}"
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
    body = b'{"input_ids": [1]}'
    for _ in range(6):
        httpx.post(f"{two.address}/models/gpt/embed", content=body)
    time.sleep(2 * FLUSH_INTERVAL_SECONDS)
    text = httpx.get(f"{two.address}/metrics").text
    documentation = (ROOT / "docs/reference/metrics.md").read_text()
    assert all(f"`{family.name}" in documentation for family in text_string_to_metric_families(text))
    found = samples_of(text)
    assert found["preblock_request_bytes_total", "native"] >= 6 * len(body)
    assert len([name for name, *_ in found if name == "preblock_provider_info"]) == 1
    largest = max(status_bytes(worker, "RssAnon") for worker in workers(two.pid))
    assert found["preblock_resident_memory_bytes", "anonymous"] > 1.5 * largest


def test_running_requests_gauge_excludes_dead_workers(two: Server) -> None:
    def running() -> set[float]:
        """Return the values of several scrapes, by any worker."""
        return {read_metrics(two.address)["preblock_requests_running", "native"] for _ in range(4)}

    host, port = two.address.removeprefix("http://").split(":")
    # A body over 256 KiB, of which only the beginning is sent.
    head = b"POST /models/gpt/embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
    head += b"Content-Type: application/json\r\n\r\n{"
    with ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head)
        wait_until(lambda: running() == {6})
        killed = workers(two.pid)
        for worker in killed:
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not set(killed) & set(workers(two.pid)))
        wait_until(lambda: running() == {0})
