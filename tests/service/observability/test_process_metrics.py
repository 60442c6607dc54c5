"""Metrics of processes and the build, their files, and OpenMetrics. Oracles: prometheus-client, and proc(5)."""

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

from preblock.service.observability.process_metrics import (
    PAGE_BYTES,
    RESIDENT,
    count_descriptors,
    read_stat,
    remove_dead_gauges,
    version_of,
)
from tests.support.processes import fork_servers, status_bytes, workers
from tests.support.scrapes import samples_of
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

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
    found = families(running)
    units = {name: family.unit for name, family in found.items() if family.unit}
    assert units["preblock_request_duration_seconds"] == "seconds"
    assert units["preblock_model_request_seconds"] == "seconds"
    assert units["preblock_request_bytes"] == units["process_resident_memory_bytes"] == "bytes"
    assert all(name.endswith(f"_{unit}") for name, unit in units.items())
    assert all(name in units for name in found if name.endswith(("_seconds", "_bytes")))
    text = (
        httpx.get(f"{running.address}/metrics").text + httpx.get(f"{running.address}/metrics", headers=OPENMETRICS).text
    )
    assert "_created" not in text


def test_ended_process_has_no_usage() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert (read_stat(ended.pid), count_descriptors(ended.pid)) == (None, 0)
    fields = read_stat(os.getpid())
    assert fields is not None
    assert PAGE_BYTES * int(fields[RESIDENT]) == pytest.approx(status_bytes(os.getpid(), "VmRSS"), rel=0.1)
    assert count_descriptors(os.getpid()) > 2


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
