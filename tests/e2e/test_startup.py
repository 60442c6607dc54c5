"""Answers of a service during its start. Real processes, with many models for a slow start."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_socket

from preblock.service.artifacts.manifest import MANIFEST
from preblock.service.core.auth import new_key
from tests.support.paths import PREBLOCK
from tests.support.scrapes import read_metrics
from tests.support.servers import free_port
from tests.support.waiting import wait_until

MODELS = 150
"""Each takes some milliseconds to open."""


@pytest.fixture(scope="module")
def many(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of many models with the same files."""
    root = tmp_path_factory.mktemp("many")
    for number in range(MODELS):
        (root / f"gpt{number:03}").mkdir()
        (root / f"gpt{number:03}" / "1").symlink_to(tiny_repository / "gpt" / "1")
    return root


@contextmanager
def starting(root: Path, *options: str) -> Iterator[tuple[httpx.Client, "subprocess.Popen[str]"]]:
    """Start a server, and go on as soon as it answers anything."""
    port = free_port()
    command = [PREBLOCK, "serve", "--repository", str(root), "--port", str(port), *options]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            while process.poll() is None:
                try:
                    client.get("/livez").raise_for_status()
                    break
                except httpx.ConnectError:
                    time.sleep(0.005)
            yield client, process
        finally:
            process.kill()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_health_says_how_far_a_start_is(many: Path, workers: str) -> None:
    with starting(many, "--workers", workers) as (client, process):
        told = []
        first = client.get("/readyz")
        embedding = client.post("/models/gpt000/embed", json={"input_ids": [1]})
        inference = client.get("/v2/models/gpt000")
        health = [client.get(f"/v2/health/{asked}").status_code for asked in ("live", "ready")]
        metrics = read_metrics(client)
        counted = {state: metrics["preblock_models", state] for state in ("ready", "loading")}
        with pytest.raises(InvalidStatus) as refused:
            connect_socket(str(client.base_url.copy_with(scheme="ws", path="/models/gpt000/decode")))
        while (answer := client.get("/readyz")).status_code == 503:
            assert answer.headers["Retry-After"] == "1"
            assert client.get("/livez").status_code == 200
            told.append(answer.json())
            time.sleep(0.01)  # the rest of the processor is for the start
        assert (first.status_code, first.json()["status"]) == (503, "starting")
        assert (embedding.status_code, embedding.headers["Retry-After"]) == (503, "1")
        assert re.fullmatch(
            r"server: got \d+ of \d+ models open, allowed a request once all of them are", embedding.json()["detail"]
        )
        assert (inference.status_code, inference.headers["Retry-After"]) == (503, "1")
        assert inference.json()["error"].startswith("server: got ")
        assert refused.value.response.status_code == 503
        assert health == [200, 503]
        assert counted["ready"] + counted["loading"] in (0, MODELS)
        assert {tuple(document) for document in told} == {("status", "ready", "of", "model")}
        ready = [document["ready"] for document in told]
        assert ready == sorted(ready)
        assert len(set(ready)) > 2
        assert {document["of"] for document in told} <= {0, MODELS}
        while_opening = [document for document in told if document["ready"] < document["of"]]
        assert {document["model"] for document in while_opening} <= {f"gpt{n:03}" for n in range(MODELS)}
        # Ready is ready: every later request is answered.
        assert answer.content == b""
        for _ in range(10):
            with httpx.Client(base_url=client.base_url, timeout=60) as another:
                another.post("/models/gpt149/embed", json={"input_ids": [1]}).raise_for_status()
        assert f'preblock_models{{state="ready"}} {MODELS}' in client.get("/metrics").text
        process.terminate()
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert output.startswith("Preblock serves on ")


def test_startup_hides_model_names_without_a_key(many: Path, tmp_path: Path) -> None:
    key, entry = new_key("alice", (), admin=False)
    (tmp_path / "keys.toml").write_text(entry)
    with starting(many, "--api-keys-file", str(tmp_path / "keys.toml")) as (client, _):
        told, refused = client.get("/readyz"), client.get("/metrics")
        let_in = client.get("/metrics", headers={"Authorization": f"Bearer {key}"})
        assert (told.status_code, told.json()["model"]) == (503, None)
        assert refused.status_code == 401
        assert (let_in.status_code, "preblock_models" in let_in.text) == (200, True)


def test_late_body_is_read_before_the_refusal(many: Path) -> None:
    with starting(many) as (client, _):
        for _ in range(5):  # the client sends head and body apart
            answer = client.post("/models/gpt000/embed", content=iter([b"x" * 100_000] * 10))
            assert (answer.status_code, answer.headers["Connection"]) == (503, "close")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_ends_a_start(many: Path, workers: str) -> None:
    with starting(many, "--workers", workers) as (client, process):
        assert client.get("/readyz").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_broken_model_ends_a_start_with_one_line(many: Path, tmp_path: Path, workers: str) -> None:
    for model in many.iterdir():
        (tmp_path / model.name).symlink_to(model)
    (tmp_path / "zzz" / "1").mkdir(parents=True)
    (tmp_path / "zzz" / "1" / MANIFEST).write_text(json.dumps({}))
    with starting(tmp_path, "--workers", workers) as (client, process):
        assert client.get("/readyz").status_code == 503
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert errors == "preblock: zzz/1/manifest.json family: got {}, allowed Field required\n"


@pytest.mark.parametrize(("output", "workers"), [("pipe", "1"), ("pipe", "2"), ("full", "1"), ("closed", "1")])
def test_unread_banner_ends_nothing(tiny_repository: Path, output: str, workers: str) -> None:
    port = free_port()
    command = [PREBLOCK, "serve", "--repository", str(tiny_repository), "--port", str(port), "--workers", workers]
    if output == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "wb") as unread,
        Path("/dev/full").open("wb") as full,
        subprocess.Popen(
            command, stdout=full if output == "full" else unread, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:

            def is_ready() -> bool:
                assert process.poll() is None
                with suppress(httpx.ConnectError):
                    return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code == 200
                return False

            wait_until(is_ready, 60)
            time.sleep(0.2)  # it is announced now
            httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).raise_for_status()
        finally:
            process.terminate()
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
