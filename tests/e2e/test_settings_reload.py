"""The file of settings, changed while a real server runs."""

import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from websockets.sync.client import connect as connect_socket

from preblock.service.core.settings import RELOADABLE, Settings
from tests.e2e.setting_effects import (
    SECONDS,
    SEEN,
    TOGETHER,
    Served,
    served,
    stream,
    too_many_rows,
    too_many_tokens,
)
from tests.service.server.test_websocket import step
from tests.support.artifacts import copy_artifact
from tests.support.processes import workers as workers_of
from tests.support.waiting import wait_until

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
    """Prepared requests follow new limits. No connection is dropped."""

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
        opened.send('{"input_ids": [1, 2, 3]}')  # the stream was opened before
        assert json.loads(opened.recv(SECONDS))["error"]["status"] == 413
        reloading.set("")
        wait_until(lambda: ask() == 200)
        opened.send('{"input_ids": [1, 2, 3]}')
        assert json.loads(opened.recv(SECONDS))["next_offset"] == [3]


def test_lowered_row_limit_rejects_step_of_open_stream(reloading: Served) -> None:
    with connect_socket(f"{reloading.address.replace('http', 'ws', 1)}/models/gpt/decode?rows=3") as opened:

        def answered() -> bool:
            opened.send(step([[1], [2], [3]]))
            told = opened.recv(SECONDS)
            assert isinstance(told, bytes)
            return b"at most 2 rows" not in told

        assert answered()
        reloading.set("max_request_rows = 2\n")
        wait_until(lambda: reloading.refused({"input_ids": [[1]] * 3}, 413, "at most 2 rows"))
        assert not answered()
        reloading.set("")


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


def test_option_overrides_reloaded_file(tiny_repository: Path, tmp_path: Path) -> None:
    with served(tiny_repository, tmp_path, "--max-request-tokens", "3") as server:
        server.set("max_request_tokens = 2\nmax_request_rows = 1\n")
        wait_until(lambda: too_many_rows(server))
        assert server.ask({"input_ids": [[1, 2, 3]]})[0] == 200


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


def test_settings_change_before_first_poll_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "preblock.toml"
    file.write_text("max_request_rows = 5\n")
    settings = Settings(config_file=str(file), port="1")
    file.write_text("max_request_rows = 6\n")
    assert (settings.reload().max_request_rows, settings.reload().port) == (6, 1)
    assert settings.max_request_rows == 5
