"""Counters of one process, metrics of processes and the build. Oracles: prometheus-client, and proc(5)."""

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from preblock.service.core.errors import Invalid, NotFound
from preblock.service.engine.admission import Admission, Limits
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext, RequestRecord
from preblock.service.observability.instruments import BUCKETS_SECONDS, MAX_BATCH_LABEL
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from preblock.service.observability.process_metrics import (
    FOLDER,
    PAGE_BYTES,
    RESIDENT,
    count_descriptors,
    read_stat,
    remove_dead_gauges,
    version_of,
    worker_processes,
)
from tests.support.engines import live_settings
from tests.support.processes import fork_servers, status_bytes, workers
from tests.support.scrapes import Samples, samples_of
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until


def samples(metrics: Metrics) -> Samples:
    return samples_of(metrics.expose()[0].decode())


def admission(metrics: Metrics) -> Admission:
    settings = live_settings()
    return Admission(Limits(settings), metrics, AccessLog(settings))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Invalid("f", 1, "0"), "Invalid"),
        (NotFound("f", 1, "0"), "NotFound"),
        (ZeroDivisionError(), "internal_error"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_error_class_is_the_outcome(error: BaseException, outcome: str) -> None:
    metrics = Metrics()
    with pytest.raises(type(error)), admission(metrics).request("grpc"):
        raise error
    assert samples(metrics)["preblock_requests_total", "", outcome, "grpc"] == 1
    assert samples(metrics)["preblock_request_duration_seconds_count", "grpc"] == 1


def test_ended_request_leaves_no_reference_cycle() -> None:
    metrics = Metrics()
    seen = admission(metrics)
    gc.collect()
    token = CURRENT_REQUEST.set(RequestContext(b"id"))
    with seen.request("native"):
        pass
    CURRENT_REQUEST.reset(token)
    del token
    metrics.flush()
    assert gc.collect() == 0


def test_record_is_counted_once() -> None:
    metrics = Metrics()
    with admission(metrics).request("native") as record:
        record.deferred = True
    assert not record.outcome
    for error in (None, ZeroDivisionError()):
        admission(metrics).end(record, error)
    assert samples(metrics)["preblock_request_duration_seconds_count", "native"] == 1


def test_request_duration_falls_into_histogram_buckets() -> None:
    metrics = Metrics()
    with admission(metrics).request("native"):
        pass
    found = samples(metrics)
    assert found["preblock_request_duration_seconds_bucket", "+Inf", "native"] == 1
    bounds = {key[1] for key in found if key[0] == "preblock_request_duration_seconds_bucket"}
    assert {float(bound) for bound in bounds} == {*BUCKETS_SECONDS, float("inf")}


def test_records_are_summed_by_model_and_batch() -> None:
    metrics, now = Metrics(), time.perf_counter()
    many = MAX_BATCH_LABEL + 1
    for ago, batch, model in ((60, 1, "m"), (59, 2, "m"), (1, 1, "m"), (58, many, "m"), (57, 1, "other")):
        record = RequestRecord("native", started=now - ago - 0.2)
        record.select(model, 1)
        record.selected, record.checked, record.dequeued, record.ran, record.ended = (
            now - ago + late for late in (0, 0.1, 0.3, 0.6, 1)
        )
        record.rows, record.batch, record.tokens = batch, batch, 5
        record.end(None)
        metrics.record(record)
        metrics.count_bytes("native", 10, 20, 0.01, 0.02)
    found = samples(metrics)
    assert found["preblock_requests_total", "m", "ok", "native"] == 4
    assert found["preblock_request_duration_seconds_count", "native"] == 5
    assert found["preblock_request_duration_seconds_sum", "native"] == pytest.approx(5 * 1.2)
    assert found["preblock_request_decode_seconds_total", "native"] == pytest.approx(5 * 0.3)
    assert found["preblock_request_body_read_seconds_total", "native"] == pytest.approx(5 * 0.01)
    assert found["preblock_request_response_write_seconds_total", "native"] == pytest.approx(5 * 0.02)
    assert found["preblock_request_bytes_total", "native"] == 50
    assert found["preblock_response_bytes_total", "native"] == 100
    assert found["preblock_tokens_total", "m"] == 20
    assert found["preblock_tokens_total", "other"] == 5
    assert found["preblock_model_rows_total", "m", "1"] == 1 + 2 + 1 + MAX_BATCH_LABEL + 1
    counts = {key[2]: value for key, value in found.items() if key[:2] == ("preblock_model_stages_total", "m")}
    assert counts == {"1": 2, "2": 1, "more": 1}
    for stage, seconds in (("compute_input", 0.1), ("queue", 0.2), ("compute_infer", 0.3), ("compute_output", 0.4)):
        assert found["preblock_model_stage_seconds_total", "m", "1", stage, "1"] == pytest.approx(2 * seconds)
    assert found["preblock_model_last_request_timestamp_seconds", "m", "1"] == pytest.approx(time.time(), abs=1)
    assert samples(metrics) == found


OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture(scope="module", params=["1", "2"])
def running(request: pytest.FixtureRequest, tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository, "--workers", request.param) as server:
        pid = server.pid
        wait_until(lambda: len(workers(pid)) == (int(request.param) if request.param != "1" else 0))
        httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": [1]}).raise_for_status()
        yield server


def families(server: Server) -> dict[str, Metric]:
    answer = httpx.get(f"{server.address}/metrics", headers=OPENMETRICS)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}  # type: ignore[no-untyped-call]


def processes(server: Server) -> list[int]:
    pid = server.pid
    return [pid, *fork_servers(pid), *workers(pid)]


def test_process_metrics_are_summed_over_processes(running: Server) -> None:
    wait_until(lambda: families(running)["process_max_fds"].samples[0].value % len(processes(running)) == 0)
    found = samples_of(httpx.get(f"{running.address}/metrics").text)
    resident = sum(status_bytes(pid, "VmRSS") for pid in processes(running))
    assert found["process_resident_memory_bytes",] == pytest.approx(resident, rel=0.2)
    virtual = sum(status_bytes(pid, "VmSize") for pid in processes(running))
    assert found["process_virtual_memory_bytes",] == pytest.approx(virtual, rel=0.2)
    fds = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes(running))
    assert found["process_open_fds",] == pytest.approx(fds, abs=10)
    assert 0 < found["process_cpu_seconds_total",] < 600
    assert time.time() - 600 < found["process_start_time_seconds",] < time.time()


def test_build_info_states_the_versions(running: Server) -> None:
    (build,) = families(running)["preblock_build"].samples
    assert build.name == "preblock_build_info"
    assert build.value == 1
    assert build.labels["version"] == version("preblock")
    assert build.labels["onnxruntime_version"] == version("onnxruntime")


def test_openmetrics_has_units_and_no_created_series(running: Server) -> None:
    units = {name: family.unit for name, family in families(running).items()}
    assert units["preblock_request_duration_seconds"] == "seconds"
    assert units["preblock_request_bytes"] == units["process_resident_memory_bytes"] == "bytes"
    assert all(name.endswith(f"_{unit}") for name, unit in units.items() if unit)
    assert all(unit for name, unit in units.items() if name.endswith(("_seconds", "_bytes")))
    for headers in ({}, OPENMETRICS):
        assert "_created" not in httpx.get(f"{running.address}/metrics", headers=headers).text


def test_ended_process_has_no_usage() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert (read_stat(ended.pid), count_descriptors(ended.pid)) == (None, 0)
    fields = read_stat(os.getpid())
    assert fields is not None
    assert PAGE_BYTES * int(fields[RESIDENT]) == pytest.approx(status_bytes(os.getpid(), "VmRSS"), rel=0.1)
    assert count_descriptors(os.getpid()) > 2


def test_process_with_id_of_ended_worker_is_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for pid in (other.pid, os.getpid()):
            (tmp_path / f"counter_{pid}.db").touch()
        found = worker_processes()
    assert found == {os.getpid()}


def test_version_of_returns_first_installed_package() -> None:
    assert version_of("a-package-that-is-not-installed", "numpy") == version("numpy")
    assert version_of("a-package-that-is-not-installed") == ""


def test_gauges_of_dead_workers_are_removed_but_not_counters(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        for kind in ("gauge_livesum", "counter"):
            (tmp_path / f"{kind}_{pid}.db").touch()
    remove_dead_gauges(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"counter_{pid}.db" for pid in (ended.pid, os.getpid())),
        f"gauge_livesum_{os.getpid()}.db",
    }
