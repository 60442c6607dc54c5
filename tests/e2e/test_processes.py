"""The start of real processes, and several workers."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import service_pb2
from websockets.sync.client import connect as connect_socket

from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import Invalid
from preblock.service.observability.metrics import FLUSH_INTERVAL_SECONDS
from preblock.service.server.addresses import bind
from tests.support.connections import dial, http_request
from tests.support.open_inference import OWN_CONNECTION, open_stub
from tests.support.paths import PREBLOCK
from tests.support.processes import fork_servers, workers
from tests.support.scrapes import read_metrics
from tests.support.servers import Server, free_port, in_use, serve
from tests.support.waiting import wait_until

MODELS = 150
"""Each takes some milliseconds to open."""


BOTH = pytest.mark.parametrize("workers", ["1", "2"])


@pytest.fixture(scope="module")
def many(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of many models with the same files."""
    root = tmp_path_factory.mktemp("many")
    for number in range(MODELS):
        (root / f"gpt{number:03}").mkdir()
        (root / f"gpt{number:03}" / "1").symlink_to(tiny_repository / "gpt" / "1")
    return root


@contextmanager
def starting(
    root: Path, *options: str, stdout: int = subprocess.PIPE, shell: tuple[str, ...] = ()
) -> Iterator["tuple[str, subprocess.Popen[str]]"]:
    """Start a server in a session of its own, and yield its address at once; a command of `shell` starts it."""
    port = free_port()
    given = ("--repository", str(root), "--port", str(port), "--log-level", "warning", *options)
    with subprocess.Popen(
        [*shell, PREBLOCK, "serve", *given], stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


def first_status(address: str, process: "subprocess.Popen[str]") -> tuple[int, int]:
    """Ask until a connection is accepted; return how many were refused, and the status of the first answer."""
    refused, deadline = 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        with suppress(httpx.ConnectError):
            return refused, httpx.get(f"{address}/readyz", timeout=60).status_code
        refused += 1
        time.sleep(0.01)
    raise AssertionError("no connection was accepted")


@BOTH
def test_server_refuses_connections_until_models_are_loaded(many: Path, workers: str) -> None:
    """The port of gRPC is open by then."""
    port = free_port()
    with starting(many, "--workers", workers, "--grpc-port", str(port)) as (address, process):
        refused, status = first_status(address, process)
        with open_stub(f"127.0.0.1:{port}") as stub:
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=30).ready
        assert (refused > 10, status) == (True, 200)
        for _ in range(10):
            httpx.post(f"{address}/models/gpt149/embed", json={"input_ids": [1]}, timeout=60).raise_for_status()
        assert f'preblock_models{{state="ready"}} {MODELS}' in httpx.get(f"{address}/metrics", timeout=60).text
        process.terminate()
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert output.startswith("Preblock serves on ")


@BOTH
def test_grpc_port_0_takes_free_port(tiny_repository: Path, workers: str) -> None:
    with serve(tiny_repository, "--grpc-port", "0", "--workers", workers) as server:
        found = re.search(r"^gRPC on 127\.0\.0\.1:(\d+)$", server.banner, re.MULTILINE)
        assert found is not None
        protocols = httpx.get(server.address, timeout=60).json()["protocols"]
        assert protocols["grpc_port"] == int(found[1]) > 0
        for _ in range(4):  # connections to both workers
            with open_stub(f"127.0.0.1:{found[1]}", OWN_CONNECTION) as stub:
                assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=30).ready
        with pytest.raises(Invalid, match=f"^{in_use(found[1], 'grpc-port')}$"):
            bind("grpc-port", "127.0.0.1", int(found[1]))


@pytest.mark.parametrize(
    ("option", "workers"),
    [*product(["--port", "--uds", "--grpc-port"], ["1", "2"]), ("--grpc-uds", "1")],
)
def test_concurrent_start_on_same_address_fails(
    tiny_repository: Path, tmp_path: Path, option: str, workers: str
) -> None:
    port, path = str(free_port()), tmp_path / "socket"
    given = option, str(path) if "uds" in option else port, "--workers", workers
    with starting(tiny_repository, *given) as (_, first), starting(tiny_repository, *given) as (_, second):
        while first.poll() is None and second.poll() is None:
            time.sleep(0.01)
        loser, winner = (first, second) if first.poll() is not None else (second, first)
        errors = loser.communicate(timeout=60)[1]
        taken = f"the socket {path} is already in use" if "uds" in option else in_use(port, option.removeprefix("--"))
        assert (loser.returncode, errors) == (1, f"preblock: {taken}\n")
        assert winner.poll() is None


def test_interrupt_during_startup_of_workers_prints_no_traceback(tiny_repository: Path) -> None:
    with starting(tiny_repository, "--workers", "2") as (_, process):
        wait_until(lambda: fork_servers(process.pid), pause=0.001)
        time.sleep(0.2)  # the fork server imports modules
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
        assert "Traceback" not in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(("workers", "seconds"), [*(("1", n / 20) for n in range(6)), ("2", 0.0), ("2", 0.2)])
def test_sigterm_during_startup_stops_server(many: Path, tmp_path: Path, workers: str, seconds: float) -> None:
    with starting(many, "--workers", workers, "--uds", str(tmp_path / "socket")) as (_, process):
        wait_until(lambda: list(tmp_path.iterdir()), pause=0.001)  # the models are being opened
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list(tmp_path.iterdir())


@BOTH
def test_startup_with_broken_model_fails_with_one_line(many: Path, tmp_path: Path, workers: str) -> None:
    for model in many.iterdir():
        (tmp_path / model.name).symlink_to(model)
    (tmp_path / "zzz" / "1").mkdir(parents=True)
    (tmp_path / "zzz" / "1" / MANIFEST).write_text(json.dumps({}))
    with starting(tmp_path, "--workers", workers) as (_, process):
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert errors == "preblock: zzz/1/manifest.json family: got nothing, expected a value\n"


@pytest.mark.parametrize(("output", "workers"), [("pipe", "1"), ("pipe", "2"), ("full", "1")])
def test_server_survives_closed_or_full_stdout(tiny_repository: Path, output: str, workers: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread, Path("/dev/full").open("wb") as full:
        stdout = (full if output == "full" else unread).fileno()
        with starting(tiny_repository, "--workers", workers, stdout=stdout) as (address, process):
            assert first_status(address, process)[1] == 200
            time.sleep(0.2)  # it is announced now
            httpx.get(f"{address}/readyz", timeout=60).raise_for_status()
            process.terminate()
            assert process.communicate(timeout=60)[1] == ""
            assert process.returncode == 0


@pytest.mark.parametrize(("option", "value"), [("--stream-idle-timeout-seconds", 10**9), ("--max-body-bytes", 2**32)])
def test_setting_beyond_32_bits_starts_server(tiny_repository: Path, option: str, value: int) -> None:
    """Sockets and gRPC take 32 bits: of milliseconds, or of bytes."""
    with serve(tiny_repository, option, str(value)) as server, httpx.Client(base_url=server.address) as client:
        assert client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200


@BOTH
def test_closed_standard_streams_are_replaced(tiny_repository: Path, workers: str) -> None:
    """A socket with the number of one would receive log lines, and libuv aborts when it closes it."""
    closed = ("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-')
    with starting(tiny_repository, "--workers", workers, shell=closed) as (address, process):
        assert first_status(address, process)[1] == 200
        assert {str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)} == {os.devnull}
        process.terminate()
        assert process.wait(60) == 0


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


@pytest.mark.parametrize("count", ["1", "2"])
def test_unload_closes_model_opened_at_the_start(model_repository: Path, count: str) -> None:
    options = "--model-control", "explicit", "--load-model", "wordllama", "--load-model", "minilm", "--workers", count
    with serve(model_repository, *options) as server:

        def mapped(model: str) -> bool:
            """Return whether a process of the service has files of a model open."""
            processes = (server.pid, *workers(server.pid))
            return any(f"/{model}/" in Path(f"/proc/{pid}/maps").read_text() for pid in processes)

        assert mapped("minilm")
        httpx.post(f"{server.address}/v2/repository/models/minilm/unload", json={}, timeout=60).raise_for_status()
        wait_until(lambda: not mapped("minilm"))
        assert mapped("wordllama")


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


def test_gauges_are_summed_over_living_workers(two: Server) -> None:
    def gauges() -> set[tuple[float, float]]:
        """Return open streams and running requests in several scrapes, by any worker."""
        scrapes = [read_metrics(two.address) for _ in range(4)]
        return {(found["preblock_streams_open",], found["preblock_requests_running", "native"]) for found in scrapes}

    with ExitStack() as stack:
        for _ in range(3):
            stream = stack.enter_context(connect_socket(f"{two.socket}/models/gpt/decode"))
            stream.send('{"input_ids": [1]}')
            stream.recv()
        for _ in range(6):  # bodies over 256 KiB, of which only the beginning is sent
            connection = stack.enter_context(dial(two.address))
            connection.sendall(http_request("/models/gpt/embed", bytes(1_000_000))[:1000])
        wait_until(lambda: gauges() == {(3, 6)})
        killed = workers(two.pid)
        for worker in killed:
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not set(killed) & set(workers(two.pid)))
        wait_until(lambda: gauges() == {(0, 0)})
