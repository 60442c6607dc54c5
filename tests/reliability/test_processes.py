"""Killed processes, full disks, a lack of descriptors or memory, broken folders, and jumps of the clock."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect as connect_socket

from preblock.service.artifacts.names import DATA, MANIFEST
from preblock.service.observability.process_metrics import RESERVED_BYTES
from preblock.service.server.supervisor import OUTAGE_SECONDS
from tests.reliability.load import BYTES, answers, descriptors, ended, load, ready, replaced, serve_two, wait_for
from tests.reliability.wires import connection, request, still_right
from tests.support.paths import PREBLOCK
from tests.support.processes import children, fork_servers, workers
from tests.support.scrapes import samples_of
from tests.support.servers import Server, free_port, read_banner, serve
from tests.support.tls import TlsFiles

EMBED = "/models/gpt/embed"
HEALTH = ("/livez", "/v2/health/live", "/health", "/ping", "/v2/health/ready")


def test_killed_worker_loses_only_its_requests_and_is_replaced(
    tiny_repository: Path, good_answer: bytes, long: bool
) -> None:
    with serve_two(tiny_repository) as server:
        clients = 8
        with load(server, good_answer, clients) as seen:
            for _ in range(20 if long else 1):
                wait_for(partial(seen.answered, 100))
                before, broken = workers(server.pid), seen.broken
                os.kill(before[0], signal.SIGKILL)
                wait_for(partial(replaced, server, before))
                wait_for(partial(answers, server))
                assert seen.broken - broken <= clients  # one in flight for each connection
                seen.right = 0
            wait_for(partial(seen.answered, 100))
        assert not seen.wrong


def test_stopped_worker_delays_neither_replacement_nor_end(tiny_repository: Path) -> None:
    with serve_two(tiny_repository, "--shutdown-timeout-seconds", "1") as server:
        stopped, killed = workers(server.pid)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(1)  # it has been checked, and does not answer
        began = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(set(workers(server.pid)) - {stopped, killed}) == 1)
        assert time.monotonic() - began < 10  # half the time of a check
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        assert ended([stopped])


def test_workers_end_with_the_longest_shutdown_timeout(tiny_repository: Path) -> None:
    with serve_two(tiny_repository, "--shutdown-timeout-seconds", "1000000000") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_worker_is_replaced_after_its_fork_server_is_killed(tiny_repository: Path, good_answer: bytes) -> None:
    with serve_two(tiny_repository) as server:
        before, (first,) = workers(server.pid), fork_servers(server.pid)
        os.kill(first, signal.SIGSTOP)
        os.kill(before[0], signal.SIGKILL)
        time.sleep(1.5)  # the next is asked for, and not given
        os.kill(first, signal.SIGKILL)
        wait_for(partial(ended, before))
        wait_for(partial(ready, server))
        with load(server, good_answer, 2, outage=True) as seen:
            wait_for(partial(seen.answered, 20))
        assert not seen.wrong


@contextmanager
def parent(repository: Path, port: int, grpc_port: int) -> Iterator[subprocess.Popen[str]]:
    """Serve with two workers on these ports, and kill all remaining processes."""
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    command = [PREBLOCK, "serve", "--repository", str(repository), *ports, "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_killed_service_frees_its_port(
    tiny_repository: Path, good_answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed process tidies nothing up
    with ExitStack() as stack:
        port, grpc_port = 0, free_port()
        for _ in range(2):
            process = stack.enter_context(parent(tiny_repository, port, grpc_port))
            banner, address = read_banner(process)
            port, server = httpx.URL(address).port or 0, Server(address, f"127.0.0.1:{grpc_port}", process.pid, banner)
            wait_for(partial(ready, server))
            family = [*children(process.pid), *workers(process.pid)]
            assert len(family) > 2
            with load(server, good_answer) as seen:
                wait_for(partial(seen.answered, 50))
                process.kill()
                wait_for(partial(ended, family))
            assert not seen.wrong


def test_killed_fork_server_is_replaced_with_its_workers(tiny_repository: Path, good_answer: bytes) -> None:
    """Nobody can report their ends any more, so all are replaced, after their requests in flight.

    Until others serve, connections wait; after `OUTAGE_SECONDS` the parent refuses requests.
    """
    with serve_two(tiny_repository) as server:
        before, (first,) = workers(server.pid), fork_servers(server.pid)
        clients = 8
        with load(server, good_answer, clients, 0.02, outage=True) as seen:
            wait_for(partial(seen.answered, 50))
            os.kill(first, signal.SIGKILL)
            wait_for(partial(ended, [first, *before]))
            wait_for(partial(ready, server))
            assert fork_servers(server.pid) != [first]
            right, after = seen.right, workers(server.pid)
            wait_for(partial(seen.answered, right + 50))
            os.kill(after[0], signal.SIGKILL)
            wait_for(partial(replaced, server, after))
            wait_for(partial(ready, server))
            right = seen.right
            wait_for(partial(seen.answered, right + 50))
        assert not seen.wrong
        assert seen.broken <= 4 * clients  # each may lose its connection to an ending worker, and reach another one


def test_removed_or_replaced_folder_does_not_change_responses(weighty_repository: Path, tmp_path: Path) -> None:
    """Oracle: the answers before. Files are replaced, as is the way to write them."""
    ids = {"input_ids": [list(range(50))]}
    root = shutil.copytree(weighty_repository, tmp_path / "root")
    data = root / "gpt/1" / DATA
    with (
        serve(root, "--model-control", "poll", "--model-poll-interval-seconds", "0.1") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):

        def ask() -> bytes:
            return client.post("/models/gpt/embed", json=ids, headers=BYTES).raise_for_status().content

        before = ask()
        table = json.loads((root / "gpt/1" / MANIFEST).read_text())["kernel"]["positions"]
        positions = data.read_bytes()[table["begin"] :][: 4 * 50 * 32]
        draft = data.with_name("draft")
        draft.write_bytes(bytes(data.stat().st_size))
        draft.replace(data)
        time.sleep(0.5)
        assert ask() == before
        shutil.rmtree(root)
        time.sleep(0.5)
        assert ask() == before
        rows = client.get("/models/gpt/positions?count=50", headers=BYTES).raise_for_status().content
        assert rows == positions  # only now read for the first time


def test_parent_answers_health_checks_without_workers(weighty_repository: Path, tmp_path: Path) -> None:
    """Requests for a truncated data file kill both workers (SIGBUS), and no other worker can start."""
    root = shutil.copytree(weighty_repository, tmp_path / "root")
    data = root / "gpt/1" / DATA
    content = data.read_bytes()
    with serve_two(root) as server:

        def ask(path: str, timeout: float = 2) -> httpx.Response:
            method = "POST" if path == EMBED else "GET"
            with suppress(httpx.TransportError):
                return httpx.request(method, server.address + path, json={"input_ids": [1]}, timeout=timeout)
            return httpx.Response(0)

        os.truncate(data, 0)
        began = time.monotonic()
        while ask("/readyz").status_code != 503:
            ask(EMBED, 1)
            assert time.monotonic() - began < 60
        while time.monotonic() - began < 20:
            statuses = [ask(path).status_code for path in HEALTH]
            assert statuses == [200, 200, 503, 503, 503]
            answer = ask(EMBED)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json()["request_id"] == answer.headers["X-Request-Id"]
            time.sleep(0.5)
        log = Path(f"/proc/{server.pid}/fd/2").read_text().splitlines()
        failures = [line for line in log if "WARNING" in line or "ERROR" in line]
        assert 1 <= len(failures) <= 4, failures
        data.write_bytes(content)
        wait_for(lambda: len(workers(server.pid)) == 2)

        # The server of the outage accepts connections for a moment longer, and then resets them.
        wait_for(lambda: all(ask(EMBED, 30).status_code == 200 for _ in range(10)))


def test_outage_server_keeps_the_rules_of_workers(tiny_repository: Path, tmp_path: Path) -> None:
    """The rules are allowed hosts and current TLS files, in each outage; and SIGTERM ends it at once."""
    root, away, tls = shutil.copytree(tiny_repository, tmp_path / "root"), tmp_path / "away", TlsFiles(tmp_path)
    context = tls.context()

    def status(path: str, host: str = "localhost") -> int:
        with suppress(httpx.TransportError):
            return httpx.get(server.address + path, headers={"Host": host}, timeout=5, verify=context).status_code
        return 0

    def shown() -> bytes | None:
        with suppress(OSError):
            return tls.shown(server.address)
        return None

    def begin_outage() -> None:
        root.rename(away)
        root.mkdir()
        for pid in workers(server.process.pid):
            os.kill(pid, signal.SIGKILL)

    with serve(root, "--workers", "2", *tls.options) as server:
        begin_outage()
        wait_for(lambda: status("/readyz") == 503)
        assert [status(path, "evil.example") for path in ("/livez", "/models")] == [421, 421]
        second = tls.write_key(tls.write_certificate())
        wait_for(lambda: shown() == second)
        root.rmdir()
        away.rename(root)
        wait_for(lambda: status("/readyz") == 200)
        tls.certificate.write_text("no certificate")
        begin_outage()
        time.sleep(OUTAGE_SECONDS + 1)  # the parent could not serve
        third = tls.write_key(tls.write_certificate())
        wait_for(lambda: shown() == third)
        with tls.connect(server.address) as stream:
            stream.sendall(b"GET /livez HTTP/1.1\r\n")
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(60)
            assert time.monotonic() - began < 8  # requests have 15 s


@pytest.mark.parametrize("options", [("none",), ("explicit", "--load-model", "*")])
def test_replaced_workers_serve_the_same_versions(
    tiny_repository: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    root, later = shutil.copytree(tiny_repository, tmp_path / "root"), tmp_path / "2"
    (root / "bert/2").rename(later)
    with serve_two(root, "--model-control", *options) as server:
        unloaded = httpx.post(f"{server.address}/v2/repository/models/gpt/unload", timeout=60).status_code == 200
        later.rename(root / "bert/2")
        before, answered = workers(server.pid), set()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(set(workers(server.pid)) - set(before)) == 2)
        for _ in range(40):
            asked = [httpx.get(f"{server.address}/models/{name}", timeout=60) for name in ("bert", "gpt")]
            answered.add((asked[0].json()["version"], asked[1].status_code))
        assert answered == {(1, 404 if unloaded else 200)}
        assert unloaded == (options[0] == "explicit")
        if unloaded:
            httpx.post(f"{server.address}/v2/repository/models/bert/load", timeout=60).raise_for_status()
            found = {httpx.get(f"{server.address}/models/bert", timeout=60).json()["version"] for _ in range(16)}
            assert found == {2}


FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
def test_clock_jumps_do_not_affect_responses(tiny_repository: Path, tmp_path: Path, good_answer: bytes) -> None:
    """The service measures time by the monotonic clock; only the date of an answer shows the jumps."""
    clock = tmp_path / "clock"
    clock.write_text("+0")
    fake = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    fake |= {
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS": "600",
        "PREBLOCK_STREAM_MAX_LIFETIME_SECONDS": "900",
    }
    with (
        serve(tiny_repository, **fake) as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
        connect_socket(f"{server.socket}/models/gpt/decode") as stream,
    ):
        years = []
        for jump in ("+0", "+3650d", "-3650d", "+0"):
            clock.write_text(jump)
            time.sleep(1.5)  # the date of answers is told once a second
            still_right(client, good_answer)
            stream.send('{"ping": true}')
            assert stream.recv() == '{"next_offset":[0]}'
            assert client.get("/metrics").status_code == 200
            years.append(int(client.get("/livez").headers["date"].split()[3]))
        assert years[1] - years[0] in (9, 10)
        assert years[0] - years[2] in (9, 10)
        assert years[3] == years[0]


EXPLICIT = "--model-control", "explicit", "--load-model", "*"


def crowd(server: Server, count: int, sent: bytes, stack: ExitStack) -> None:
    """Open connections until the end of the stack, and send the same on each."""
    for _ in range(count):
        stream = stack.enter_context(connection(server))
        with suppress(ConnectionError):
            stream.sendall(sent)


def all_serve(server: Server, model: str) -> bool:
    """Return whether both workers answer for a model."""
    path = f"{server.address}/models/{model}/embed"
    return all(httpx.post(path, json={"input_ids": [1]}).status_code == 200 for _ in range(16))


@contextmanager
def short_of_memory(pid: int) -> Iterator[None]:
    """Leave a process 64 MiB, less than the table of `gpt2-small`."""
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(pid, resource.RLIMIT_AS, used + 2**26):
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("this user mounts nothing")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> Path:
    file = disk / "filling"
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    return file


def test_full_disk_does_not_affect_clients(tiny_repository: Path, good_answer: bytes, small_disk: Path) -> None:
    """A page of a mapped file without room on the disk would end its process."""
    folders = {"TMPDIR": str(small_disk), "PREBLOCK_CACHE_DIR": str(small_disk / "cache")}
    with serve_two(tiny_repository, *EXPLICIT, **folders) as server:
        before = workers(server.pid)
        filling = fill(small_disk)
        with load(server, good_answer, 4, 0.02) as seen, httpx.Client(base_url=server.address, timeout=60) as client:
            for rows in range(1, 64):  # each number of rows has counters of its own
                assert client.post("/models/bert/embed", json={"input_ids": [[1]] * rows}).status_code == 200
                assert client.post("/models/bert/embed", json={"input_ids": [[11]] * rows}).status_code == 422
            assert client.get("/metrics").status_code == 200
            refused = client.post("/v2/repository/models/bert/unload")
            assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (
                503,
                "the change of 'bert' could not be written for the workers",
            )
            filling.unlink()
            assert client.post("/v2/repository/models/bert/unload").status_code == 200
            assert client.post("/models/bert/embed", json={"input_ids": [1]}).status_code == 404
        assert not seen.wrong
        assert not seen.broken
        assert workers(server.pid) == before


def test_metric_file_space_is_reserved_at_start(tiny_repository: Path, tmp_path: Path) -> None:
    with serve_two(tiny_repository, TMPDIR=str(tmp_path)) as server:
        (folder,) = tmp_path.glob("preblock-*/metrics")
        wait_for(lambda: len(list(folder.glob("*.db"))) == 2 * len(RESERVED_BYTES))
        for file in folder.glob("*.db"):
            kind, _, pid = file.stem.rpartition("_")
            assert int(pid) in workers(server.pid)
            assert file.stat().st_blocks * 512 >= RESERVED_BYTES[kind]


@pytest.mark.parametrize(
    ("secure", "sent"),
    [
        *((False, sent) for sent in (b"", request()[:40], request()[:-5], request())),
        (False, request("/v2/repository/index", b"{}")[:-1]),
        *((True, sent) for sent in (b"", b"\x16\x03\x01\x02\x00")),
    ],
    ids=["silent", "head", "tensors", "idle", "application", "silent before a handshake", "half a handshake"],
)
def test_waiting_clients_leave_descriptors_to_others(
    tiny_repository: Path, tmp_path: Path, good_answer: bytes, secure: bool, sent: bytes
) -> None:
    """Each unfinished handshake, too, holds a descriptor for up to `header_timeout_seconds`."""
    tls = TlsFiles(tmp_path)
    context = tls.context()
    with serve(tiny_repository, *(tls.options if secure else ())) as server, ExitStack() as stack:
        stack.enter_context(limited(server.pid, resource.RLIMIT_NOFILE, 64))
        connect = partial(httpx.Client, base_url=server.address, timeout=10, verify=context)
        idle = stack.enter_context(connect())
        still_right(idle, good_answer)
        crowd(server, 100, sent, stack)
        if secure:  # else it may be closed as the oldest
            still_right(idle, good_answer)
        for _ in range(5):
            with connect() as client:
                still_right(client, good_answer)


@contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    """Set a limit of a process in the block."""
    limits = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, limits)


def test_load_reports_a_worker_without_memory(tiny_repository: Path, model_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "repository")
    shutil.copytree(model_repository / "gpt2-small", root / "gpt2-small")
    address = "/v2/repository/models/gpt2-small"
    with serve_two(root, *EXPLICIT) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        assert client.post(f"{address}/unload").status_code == 200
        with short_of_memory(workers(server.pid)[0]):
            refused = client.post(f"{address}/load")
            assert refused.status_code == 503
            assert re.search("1 workers cannot open|gpt2-small/1 cannot be opened now", refused.json()["error"])
            assert client.post("/v2/repository/models/bert/unload").status_code == 200
        wait_for(partial(all_serve, server, "gpt2-small"))


def test_metrics_without_descriptors_are_correct_or_503(tiny_repository: Path, good_answer: bytes) -> None:
    """For some of them files are read."""
    with serve(tiny_repository) as server, ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=server.address, timeout=60)) for _ in range(8)]
        for client in clients:
            still_right(client, good_answer)
        pid = server.pid

        def told() -> bool:
            """Return whether all is told, and is true; else it is unavailable."""
            answer = clients[0].get("/metrics")
            if answer.status_code == 503:
                assert answer.headers["Retry-After"] == "1"
                return False
            found = samples_of(answer.text)
            assert found["preblock_requests_total", "gpt", "ok", "native"] == len(clients)
            assert found["preblock_resident_memory_bytes", "anonymous"] > 2**20
            return True

        assert told()
        most = max(int(descriptor.name) for descriptor in descriptors(pid)) + 1
        with limited(pid, resource.RLIMIT_NOFILE, most):
            wait_for(lambda: not told())
        wait_for(told)
