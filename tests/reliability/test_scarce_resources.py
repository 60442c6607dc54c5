"""Full disks, and a lack of descriptors or memory."""

import re
import resource
import shutil
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

from preblock.service.observability.process_metrics import RESERVED_BYTES
from tests.reliability.load import answers, descriptors, load, ready, wait_for
from tests.reliability.wires import connection, request, still_right
from tests.support.artifacts import copy_artifact
from tests.support.processes import workers
from tests.support.scrapes import samples_of
from tests.support.servers import serve


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
    with serve(
        tiny_repository, "--workers", "2", "--model-control", "explicit", "--load-model", "*", **folders
    ) as server:
        wait_for(partial(ready, server))
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
    with serve(tiny_repository, "--workers", "2", TMPDIR=str(tmp_path)) as server:
        wait_for(partial(ready, server))
        (folder,) = tmp_path.glob("preblock-*/metrics")
        wait_for(lambda: len(list(folder.glob("*.db"))) == 2 * len(RESERVED_BYTES))
        for file in folder.glob("*.db"):
            kind, _, pid = file.stem.rpartition("_")
            assert int(pid) in workers(server.pid)
            assert file.stat().st_blocks * 512 >= RESERVED_BYTES[kind]


def test_server_recovers_from_lack_of_descriptors(tiny_repository: Path, tmp_path: Path, good_answer: bytes) -> None:
    root, later = shutil.copytree(tiny_repository, tmp_path / "repository"), tmp_path / "2"
    (root / "bert/2").rename(later)
    with (
        serve(root, "--model-control", "poll", "--model-poll-interval-seconds", "0.1") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        still_right(client, good_answer)
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 10, limits[1]))
        with ExitStack() as stack:
            for _ in range(60):
                stream = stack.enter_context(connection(server))
                with suppress(ConnectionError):
                    stream.sendall(b"GET /livez HTTP/1.1\r\n")
            time.sleep(1)
            still_right(client, good_answer)  # old connections
            later.rename(root / "bert/2")
            time.sleep(0.5)
        wait_for(partial(answers, server))  # new connections
        still_right(client, good_answer)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        wait_for(lambda: client.post("/models/bert/embed", json={"input_ids": [1]}).json().get("version") == 2)


@pytest.mark.parametrize(
    "sent",
    [b"", request()[:40], request()[:-5], request("/v2/repository/index", b"{}")[:-1], request()],
    ids=["silent", "head", "tensors", "application", "idle"],
)
def test_waiting_clients_leave_descriptors_to_others(tiny_repository: Path, good_answer: bytes, sent: bytes) -> None:
    with serve(tiny_repository) as server, ExitStack() as stack:
        stack.enter_context(limited(server.pid, resource.RLIMIT_NOFILE, 64))
        for _ in range(100):
            stream = stack.enter_context(connection(server))
            with suppress(ConnectionError):
                stream.sendall(sent)
        for _ in range(5):
            with httpx.Client(base_url=server.address, timeout=10) as client:
                still_right(client, good_answer)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"], ids=["silent", "half"])
def test_handshakes_leave_descriptors_to_others(
    tiny_repository: Path, tmp_path: Path, good_answer: bytes, sent: bytes
) -> None:
    """Each unfinished handshake holds a descriptor for up to `header_timeout_seconds`."""
    authority, context = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(context)
    issued, file = authority.issue_cert("127.0.0.1"), str(tmp_path / "both.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(file)
    with serve(tiny_repository, "--tls-cert-file", file, "--tls-key", file) as server, ExitStack() as stack:
        stack.enter_context(limited(server.process.pid, resource.RLIMIT_NOFILE, 64))
        idle = stack.enter_context(httpx.Client(base_url=server.address, timeout=10, verify=context))
        still_right(idle, good_answer)
        for _ in range(100):
            stream = stack.enter_context(connection(server))
            with suppress(ConnectionError):
                stream.sendall(sent)
        still_right(idle, good_answer)
        for _ in range(5):
            with httpx.Client(base_url=server.address, timeout=10, verify=context) as client:
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


def test_workers_without_descriptors_load_a_model_later(tiny_repository: Path, good_answer: bytes) -> None:
    with (
        serve(tiny_repository, "--workers", "2", "--model-control", "explicit", "--load-model", "*") as server,
        httpx.Client(base_url=server.address, timeout=120) as client,
    ):
        wait_for(partial(ready, server))
        assert client.post("/v2/repository/models/bert/unload").status_code == 200
        with ExitStack() as stack:
            for pid in workers(server.pid):
                used = max(int(descriptor.name) for descriptor in descriptors(pid)) + 1
                stack.enter_context(limited(pid, resource.RLIMIT_NOFILE, used))
            refused = client.post("/v2/repository/models/bert/load")
            assert refused.status_code == 503
            # A worker without any free descriptor cannot even say that it lacks some.
            reasons = ("too many open files; try again later", "workers have not applied the change of 'bert' yet")
            assert refused.json()["error"].endswith(reasons)
            still_right(client, good_answer)

        def served() -> bool:
            path = f"{server.address}/models/bert/embed"
            return all(httpx.post(path, json={"input_ids": [1]}).status_code == 200 for _ in range(16))

        wait_for(served)  # by both workers, without another request to load it


def test_version_without_memory_is_opened_later(tiny_repository: Path, model_repository: Path, tmp_path: Path) -> None:
    root, path = shutil.copytree(tiny_repository, tmp_path / "repository"), "/models/gpt2-small/embed"
    later = shutil.copytree(model_repository / "gpt2-small", tmp_path / "gpt2-small")
    with (
        serve(root, "--model-control", "poll", "--model-poll-interval-seconds", "0.1") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        assert client.post("/models/gpt/embed", json={"input_ids": [1]}).status_code == 200
        pid = server.pid
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(pid, resource.RLIMIT_AS, used + 2**26):  # less than its table
            later.rename(root / "gpt2-small")
            copy_artifact("gpt-again", root, "gpt")

            def reason() -> str:
                (found,) = (one for one in client.post("/v2/repository/index").json() if one["name"] == "gpt2-small")
                return str(found.get("reason", ""))

            wait_for(lambda: client.post("/models/gpt/embed", json={"input_ids": [1]}).json()["version"] == 2)
            wait_for(lambda: "cannot be" in reason())
            assert client.post(path, json={"input_ids": [1]}).status_code == 404
        wait_for(lambda: client.post(path, json={"input_ids": [1]}).status_code == 200)


def test_load_reports_a_worker_without_memory(tiny_repository: Path, model_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "repository")
    shutil.copytree(model_repository / "gpt2-small", root / "gpt2-small")
    address = "/v2/repository/models/gpt2-small/"
    with (
        serve(root, "--workers", "2", "--model-control", "explicit", "--load-model", "*") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        wait_for(partial(ready, server))
        assert client.post(f"{address}unload").status_code == 200
        pid = workers(server.pid)[0]
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        with limited(pid, resource.RLIMIT_AS, used + 2**26):
            refused = client.post(f"{address}load")
            assert refused.status_code == 503
            assert re.search("1 workers cannot open|gpt2-small/1 cannot be opened now", refused.json()["error"])
            assert client.post("/v2/repository/models/bert/unload").status_code == 200

        def served() -> bool:
            path = f"{server.address}/models/gpt2-small/embed"
            return all(httpx.post(path, json={"input_ids": [1]}).status_code == 200 for _ in range(16))

        wait_for(served)


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
