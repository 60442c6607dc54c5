"""Killed processes, full disks, a lack of descriptors, broken folders, jumps of the clock."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import trustme
from websockets.sync.client import connect as connect_socket

from preblock.service.artifacts.names import DATA, MANIFEST
from preblock.service.server.supervisor import OUTAGE_SECONDS
from tests.reliability.load import BYTES, answers, ended, load, ready, replaced, wait_for
from tests.reliability.wires import still_right
from tests.support.connections import dial
from tests.support.paths import PREBLOCK
from tests.support.processes import children, fork_servers, workers
from tests.support.servers import Server, free_port, read_banner, serve


def test_killed_worker_loses_only_its_requests_and_is_replaced(
    tiny_repository: Path, good_answer: bytes, long: bool
) -> None:
    with serve(tiny_repository, "--workers", "2") as server:
        wait_for(partial(ready, server))
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


def test_worker_that_does_not_run_delays_neither_replacement_nor_end(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--workers", "2", "--shutdown-timeout-seconds", "1") as server:
        wait_for(partial(ready, server))
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
    with serve(tiny_repository, "--workers", "2", "--shutdown-timeout-seconds", "1000000000") as server:
        wait_for(partial(ready, server))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_worker_is_replaced_after_its_fork_server_is_killed(tiny_repository: Path, good_answer: bytes) -> None:
    with serve(tiny_repository, "--workers", "2") as server:
        wait_for(partial(ready, server))
        before, (first,) = workers(server.pid), fork_servers(server.pid)
        os.kill(first, signal.SIGSTOP)
        os.kill(before[0], signal.SIGKILL)
        time.sleep(1.5)  # the next is asked for, and not given
        os.kill(first, signal.SIGKILL)
        wait_for(partial(ended, before))
        wait_for(partial(ready, server))
        with load(server, good_answer, 2) as seen:
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
    """Nobody can report their ends any more, so all are replaced, after their requests in flight."""
    with serve(tiny_repository, "--workers", "2") as server:
        wait_for(partial(ready, server))
        before, (first,) = workers(server.pid), fork_servers(server.pid)
        clients = 8
        with load(server, good_answer, clients, 0.02) as seen:
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
    for mode in ("none", "poll"):
        root = shutil.copytree(weighty_repository, tmp_path / mode)
        data = root / "gpt/1" / DATA
        with (
            serve(root, "--model-control", mode, "--model-poll-interval-seconds", "0.1") as server,
            httpx.Client(base_url=server.address, timeout=60) as client,
        ):

            def ask(client: httpx.Client = client) -> bytes:
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


def test_model_file_changed_in_place_becomes_unavailable(weighty_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(weighty_repository, tmp_path / "root")
    shutil.copytree(root / "gpt", root / "other")
    content = (root / "gpt/1" / DATA).read_bytes()
    with (
        serve(root, "--model-control", "poll", "--model-poll-interval-seconds", "0.1") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        before = client.post("/models/gpt/embed", json={"input_ids": [1]}).raise_for_status().json()
        with (root / "gpt/1" / DATA).open("r+b") as file:
            file.write(bytes(len(content)))
        wait_for(lambda: client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 404)
        assert client.post("/models/other/embed", json={"input_ids": [1]}).status_code == 200
        index = {model["name"]: model for model in client.post("/v2/repository/index").json()}
        assert (index["gpt"]["state"], index["other"]["state"]) == ("UNAVAILABLE", "READY")
        assert DATA in index["gpt"]["reason"]
        (root / "gpt/1" / DATA).write_bytes(content)
        wait_for(lambda: client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200)
        assert client.post("/models/gpt/embed", json={"input_ids": [1]}).json() == before


def test_failed_worker_start_is_retried(tiny_repository: Path, tmp_path: Path, good_answer: bytes) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "root")
    with serve(root, "--workers", "2") as server:
        wait_for(partial(ready, server))
        first, second = workers(server.pid)
        (root / "bert").rename(tmp_path / "away")
        (root / "gpt").rename(tmp_path / "gpt")
        with load(server, good_answer, 2, 0.02) as seen:
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: first not in workers(server.pid))
            time.sleep(2)  # starts fail
            assert workers(server.pid) == [second]
            (tmp_path / "gpt").rename(root / "gpt")
            wait_for(lambda: len(workers(server.pid)) == 2)
            right = seen.right
            wait_for(partial(seen.answered, right + 20))
        assert second in workers(server.pid)
        assert not seen.wrong
        assert seen.broken <= 2


def test_parent_answers_health_checks_without_workers(weighty_repository: Path, tmp_path: Path) -> None:
    """Requests for a truncated data file kill both workers (SIGBUS), and no other worker can start."""
    root = shutil.copytree(weighty_repository, tmp_path / "root")
    data = root / "gpt/1" / DATA
    content = data.read_bytes()
    command = [PREBLOCK, "serve", "--repository", str(root), "--port", "0", "--workers", "2"]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            _, address = read_banner(process)
            wait_for(lambda: len(workers(process.pid)) == 2)

            def status(path: str) -> int:
                with suppress(httpx.TransportError):
                    return httpx.get(f"{address}{path}", timeout=2).status_code
                return 0

            assert status("/readyz") == 200
            os.truncate(data, 0)
            began = time.monotonic()
            while status("/readyz") != 503:
                with suppress(httpx.TransportError):
                    httpx.post(f"{address}/models/gpt/embed", json={"input_ids": [1]}, timeout=1)
                assert time.monotonic() - began < 60
            while time.monotonic() - began < 20:
                assert status("/livez") == status("/v2/health/live") == 200
                assert status("/health") == status("/ping") == status("/v2/health/ready") == 503
                answer = httpx.post(f"{address}/models/gpt/embed", json={"input_ids": [1]}, timeout=2)
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
                assert answer.json()["request_id"] == answer.headers["X-Request-Id"]
                time.sleep(0.5)
            log.seek(0)
            failures = [line for line in log if "WARNING" in line or "ERROR" in line]
            assert 1 <= len(failures) <= 4, failures
            data.write_bytes(content)
            wait_for(lambda: len(workers(process.pid)) == 2)

            def embed() -> int:
                with suppress(httpx.TransportError):
                    return httpx.post(f"{address}/models/gpt/embed", json={"input_ids": [1]}, timeout=30).status_code
                return 0

            # The server of the outage accepts connections for a moment longer, and then resets them.
            wait_for(lambda: all(embed() == 200 for _ in range(10)))
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_outage_server_keeps_the_rules_of_workers(tiny_repository: Path, tmp_path: Path) -> None:
    """The rules are allowed hosts and current TLS files, in each outage; and SIGTERM ends it at once."""
    root, away, authority = shutil.copytree(tiny_repository, tmp_path / "root"), tmp_path / "away", trustme.CA()
    certificate, key, context = tmp_path / "certificate.pem", tmp_path / "key.pem", ssl.create_default_context()
    authority.configure_trust(context)

    def issue() -> bytes:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(key))
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

    def status(path: str, host: str = "localhost") -> int:
        with suppress(httpx.TransportError):
            return httpx.get(server.address + path, headers={"Host": host}, timeout=5, verify=context).status_code
        return 0

    def shown() -> bytes | None:
        with (
            suppress(OSError),
            dial(server.address, 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as stream,
        ):
            return stream.getpeercert(binary_form=True)
        return None

    def begin_outage() -> None:
        shutil.move(root / "gpt", away)
        shutil.move(root / "bert", away)
        for pid in workers(server.process.pid):
            os.kill(pid, signal.SIGKILL)

    away.mkdir()
    issue()
    with serve(root, "--workers", "2", "--tls-cert-file", str(certificate), "--tls-key", str(key)) as server:
        begin_outage()
        wait_for(lambda: status("/readyz") == 503)
        assert [status(path, "evil.example") for path in ("/livez", "/models")] == [421, 421]
        second = issue()
        wait_for(lambda: shown() == second)
        for name in ("gpt", "bert"):
            shutil.move(away / name, root)
        wait_for(lambda: status("/readyz") == 200)
        certificate.write_text("no certificate")
        begin_outage()
        time.sleep(OUTAGE_SECONDS + 1)  # the parent could not serve
        third = issue()
        wait_for(lambda: shown() == third)
        with dial(server.address) as late, context.wrap_socket(late, server_hostname="127.0.0.1") as stream:
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
    with serve(root, "--workers", "2", "--model-control", *options) as server:
        wait_for(partial(ready, server))
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
