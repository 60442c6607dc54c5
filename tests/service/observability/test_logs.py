"""Access log of a real server, and the handler that writes without blocking. Oracles: the requests, and `json`."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from logging.config import DictConfigurator
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect as connect_socket

from preblock.service.core.types import TokenRows
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext, RequestRecord
from preblock.service.observability.logs import (
    DROPPED_LINES,
    AccessLog,
    ExpectedFailureFilter,
    JsonFormatter,
    LogWriter,
    RequestIdFilter,
    configuration,
)
from tests.support.artifacts import make_repository
from tests.support.engines import live_settings
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, infer_message, open_stub
from tests.support.paths import PREBLOCK
from tests.support.scrapes import read_metrics
from tests.support.servers import free_port, wait_for_answer

EMBED = "/models/gpt/embed"
BYTES = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
SECRET = 31337
"""A token id without a place in the log."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("log"), gpt="gpt-50x64x600")


def said(models: Path, ask: Callable[[str, str], None], *options: str, level: str = "warning") -> list[str]:
    """Return the log lines of a server during `ask`."""
    port, grpc_port = str(free_port()), str(free_port())
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", port, "--grpc-port", grpc_port]
    command += ["--log-level", level, *options]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ) as process,
    ):
        ask(wait_for_answer(f"http://127.0.0.1:{port}"), f"127.0.0.1:{grpc_port}")
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert bool(printed) is ("json" not in options)  # the banner is for people
        errors.seek(0)
        return errors.read().splitlines()


def ask_everything(address: str, calls: str) -> None:
    ids = np.ones((30, 600), np.int64)
    with httpx.Client(base_url=address, timeout=30) as http:
        headers = BYTES | {"X-Request-Id": "large"}
        assert http.post(f"{EMBED}?shape=30,600", content=ids.tobytes(), headers=headers).is_success
        http.post(EMBED, json={"input_ids": [SECRET]}, headers={"X-Request-Id": "wrong"})
        http.get("/models", headers={"X-Request-Id": "list"})
        http.post("/models/gpt%0A2026%20INFO%20forged/embed", json={})
    with connect_socket(
        f"{address.replace('http', 'ws', 1)}/models/gpt/decode", additional_headers={"X-Request-Id": "s"}
    ) as stream:
        for step in ([1], [SECRET], [2]):
            stream.send(json.dumps({"input_ids": step}))
            stream.recv()
    with open_stub(calls) as stub:
        stub.ModelInfer(infer_message([[0]]), metadata=[("x-request-id", "call")])


def test_access_log_has_one_text_line_per_request(models: Path) -> None:
    lines = said(models, ask_everything, "--access-log-sample-rate", "1")
    assert len(lines) == 8
    assert str(SECRET) not in "".join(lines)
    for part, text in (
        ("wrong", " INFO preblock.requests [wrong]: native gpt Invalid POST /models/gpt/embed 422 0 tokens 127.0.0.1 "),
        ("large", "native gpt ok POST /models/gpt/embed 200 18000 tokens 127.0.0.1 "),
        ("[call]", "grpc gpt ok POST /inference.GRPCInferenceService/ModelInfer OK 1 tokens 127.0.0.1 "),
        ("forged", " NotFound POST /models/gpt%0A2026%20INFO%20forged/embed 404 0 tokens 127.0.0.1 "),
    ):
        (line,) = [line for line in lines if part in line]
        assert text in line


def test_log_line_holds_configured_number_of_ids(models: Path) -> None:
    """At the level debug, libraries have lines, too."""
    options = "--log-format", "json", "--access-log-sample-rate", "1", "--access-log-max-token-ids", "3"
    found = [json.loads(line) for line in said(models, ask_everything, *options, level="debug")]
    assert any(line["message"].startswith("Started server process") for line in found)
    told = [line for line in found if line["logger"] == "preblock.requests"]
    lines = [(line["protocol"], line.get("input_ids")) for line in told]
    assert lines == [
        ("native", [[1, 1, 1]]),
        ("native", [[SECRET]]),
        ("native", None),
        ("decode-open", None),
        *(("decode", [ids]) for ids in ([1], [SECRET], [2])),
        ("grpc", [[0]]),
    ]


def test_logged_ids_are_grouped_by_rows_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "preblock.requests")
    log = AccessLog(live_settings(access_log_sample_rate=1, access_log_max_token_ids=3))
    context = RequestContext(b"mine")
    for lengths in ([2, 0, 3, 1], [5], [1], []):
        record = RequestRecord("decode", context)
        record.ids = TokenRows(np.arange(sum(lengths)), np.array(lengths, np.int64))
        log.write(record)
        log.write(RequestRecord("decode", context))  # another step, without its ids
    told = [getattr(line, "fields", {}).get("input_ids") for line in caplog.records]
    assert told == [[[0, 1], [], [2]], None, [[0, 1, 2]], None, [[0]], None, [], None]
    assert [vars(line)["ids"] for line in caplog.records[:2]] == [" [[0, 1], [], [2]]", ""]


def test_start_and_stop_are_logged_once(models: Path) -> None:
    options = "--log-format", "json", "--workers", "2"
    messages = [json.loads(line)["message"] for line in said(models, lambda *_: None, *options, level="info")]
    opened = [message for message in messages if message.startswith("model gpt version 1 opened, on ")]
    others = [message.partition(":")[0] for message in messages if not message.startswith("model ")]
    assert (len(opened), sorted(others)) == (1, ["started", "stopped", "stopping"])


def test_unread_log_pipe_does_not_block(models: Path) -> None:
    """The pipe takes 64 KiB and the service keeps a mebibyte; a line with ids has some 10 kB."""
    port = str(free_port())
    command = [PREBLOCK, "serve", "--repository", str(models), "--port", port, "--log-format", "json"]
    command += ["--access-log-sample-rate", "1", "--access-log-max-token-ids", "4096"]
    ids, asked = np.ones((6, 600), np.int64).tobytes(), 200
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, text=True
    ) as process:
        address = wait_for_answer(f"http://127.0.0.1:{port}")
        with httpx.Client(base_url=address, timeout=30) as http:
            for _ in range(asked):
                http.post(f"{EMBED}?shape=6,600", content=ids, headers=BYTES).raise_for_status()
            dropped = read_metrics(http)["preblock_log_dropped_lines_total",]
            assert dropped
            assert process.stderr is not None
            lines: list[str] = []
            while not any("were dropped" in line for line in lines[-1:]):
                lines.append(process.stderr.readline())
            report = json.loads(lines[-1])
            assert report["message"] == f"{dropped:.0f} log lines were dropped, because standard error accepted no more"
            written = [line for line in lines if json.loads(line)["logger"] == "preblock.requests"]
            assert len(written) + dropped == asked
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_sample_rate_selects_share_of_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "preblock.requests")
    log = AccessLog(live_settings(access_log_sample_rate=0.25))
    for _ in range(4000):
        log.write(RequestRecord("native"))
    assert 800 < len(caplog.records) < 1200


def test_json_log_line_holds_exception_and_request_id() -> None:
    token = CURRENT_REQUEST.set(RequestContext(b"mine"))
    try:
        raise ValueError('two\nlines "and" é')
    except ValueError as error:
        trace = (type(error), error, error.__traceback__)
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "a %s", ("b",), trace)
        assert RequestIdFilter().filter(record)
    finally:
        CURRENT_REQUEST.reset(token)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document = json.loads(line)
    assert (document["level"], document["message"], document["request_id"]) == ("ERROR", "a b", "mine")
    assert document["exception"].endswith('ValueError: two\nlines "and" é')


def test_cancelled_grpc_calls_are_not_logged(models: Path) -> None:
    """gRPC would write a traceback for each lost answer, and clients could fill a disk."""

    def leave(address: str, calls: str) -> None:
        ask_everything(address, calls)  # by default, there is no access log
        request = infer_message(np.ones((109, 600)))
        for number in range(13):  # each has a connection of its own, with a small window
            with open_stub(calls, NO_LIMIT, OWN_CONNECTION) as stub:
                began = time.monotonic()
                call = stub.ModelInfer.future(request, wait_for_ready=True, timeout=60)
                if number < 3:
                    call.result()
                    took = time.monotonic() - began
                else:
                    time.sleep(took * (0.3 + number % 10 / 14))  # most of it passes while the answer is on its way
                    call.cancel()

    assert said(models, leave) == []


LINES = 5000
SECONDS = 60


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:  # a test has closed it
            continue


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("a.library", logging.WARNING, __file__, 1, text, arguments, None)


def test_log_line_with_wrong_arguments_is_written_with_reason(pipe: tuple[int, int]) -> None:
    log = LogWriter(pipe[1])
    log.addFilter(ExpectedFailureFilter())
    log.handle(record("%d tokens", "many"))
    log.flush()
    log.close()
    assert os.read(pipe[0], 4096).decode().startswith("WARNING a.library: '%d tokens' (not formatted: ")


def test_line_break_in_message_begins_no_line(pipe: tuple[int, int]) -> None:
    formatters = DictConfigurator(configuration("text", "info"))
    log = LogWriter(pipe[1])
    log.addFilter(RequestIdFilter())
    log.setFormatter(formatters.configure_formatter(formatters.config["formatters"]["text"]))
    log.handle(record("no graph %s", "a\nINFO \x1b[31mforged\u2028"))
    log.flush()
    log.close()
    line = os.read(pipe[0], 4096).decode()
    assert line.endswith(" WARNING a.library: no graph a\\nINFO \\x1b[31mforged\\u2028\n")


def test_unwritable_log_lines_are_counted_as_dropped(pipe: tuple[int, int]) -> None:
    DROPPED_LINES.take()
    os.close(pipe[0])
    log = LogWriter(pipe[1])
    log.handle(record("lost"))
    log.flush()
    log.close()
    assert DROPPED_LINES.take() == 1


def test_non_blocking_log_pipe_gets_every_line(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    log, received = LogWriter(pipe[1]), bytearray()
    for number in range(LINES):  # more bytes than the pipe holds
        log.handle(record("%d %s", number, "x" * 100))

    def read() -> None:
        while received.count(b"\n") < LINES:
            received.extend(os.read(pipe[0], 2**16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(SECONDS)
    log.close()
    assert [line.split()[0] for line in received.decode().splitlines()] == [str(number) for number in range(LINES)]
