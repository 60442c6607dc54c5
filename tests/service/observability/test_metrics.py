"""Counters of one process, and metrics of processes. Oracles: prometheus-client, and proc(5)."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preblock.service.core.errors import Invalid
from preblock.service.engine.admission import Admission, Limits
from preblock.service.observability.context import RequestRecord
from preblock.service.observability.instruments import MAX_BATCH_LABEL
from preblock.service.observability.logs import AccessLog
from preblock.service.observability.metrics import Metrics
from preblock.service.observability.process_metrics import (
    FOLDER,
    PAGE_BYTES,
    RESIDENT,
    count_descriptors,
    read_stat,
    worker_processes,
)
from tests.support.engines import live_settings
from tests.support.processes import fork_servers, status_bytes, workers
from tests.support.scrapes import Samples, read_metrics, samples_of
from tests.support.servers import serve
from tests.support.waiting import wait_until


def samples(metrics: Metrics) -> Samples:
    return samples_of(metrics.expose()[0].decode())


def admission(metrics: Metrics) -> Admission:
    settings = live_settings()
    return Admission(Limits(settings), metrics, AccessLog(settings))


def test_error_class_is_the_outcome() -> None:
    metrics = Metrics()
    for error in (Invalid("f", 1, "0"), ZeroDivisionError(), asyncio.CancelledError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), admission(metrics).request("grpc"):
            raise error
    found = samples(metrics)
    assert [found["preblock_requests_total", "", name, "grpc"] for name in ("Invalid", "internal_error")] == [1, 1]
    assert found["preblock_requests_total", "", "cancelled", "grpc"] == 2
    assert found["preblock_request_duration_seconds_count", "grpc"] == 4


def test_record_is_counted_once() -> None:
    metrics = Metrics()
    with admission(metrics).request("native") as record:
        record.deferred = True
    assert not record.outcome
    for error in (None, ZeroDivisionError()):
        admission(metrics).end(record, error)
    assert samples(metrics)["preblock_request_duration_seconds_count", "native"] == 1


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
    assert found["preblock_request_duration_seconds_bucket", "+Inf", "native"] == 5
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


@pytest.mark.parametrize("count", [0, 2])
def test_process_metrics_are_summed_over_processes(tiny_repository: Path, count: int) -> None:
    with serve(tiny_repository, "--workers", str(count or 1)) as server:
        wait_until(lambda: len(workers(server.pid)) == count)
        processes = [server.pid, *fork_servers(server.pid), *workers(server.pid)]
        wait_until(lambda: read_metrics(server.address)["process_max_fds",] % len(processes) == 0)
        found = read_metrics(server.address)
        resident = sum(status_bytes(pid, "VmRSS") for pid in processes)
        assert found["process_resident_memory_bytes",] == pytest.approx(resident, rel=0.2)
        virtual = sum(status_bytes(pid, "VmSize") for pid in processes)
        assert found["process_virtual_memory_bytes",] == pytest.approx(virtual, rel=0.2)
        fds = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in processes)
    assert found["process_open_fds",] == pytest.approx(fds, abs=10)
    assert 0 < found["process_cpu_seconds_total",] < 600
    assert time.time() - 600 < found["process_start_time_seconds",] < time.time()


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
