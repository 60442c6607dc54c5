"""Metrics of the service's processes, summed, under the names of Prometheus client libraries, and of its build.

Several workers write theirs to files.
"""

import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from prometheus_client import multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
RESERVED_BYTES = {"counter": 2**20, "histogram": 2**18, "gauge_livesum": 2**16, "gauge_max": 2**16}
"""Size of a worker's file of each kind: enough for ten versions of models with batches of all sizes."""


def reserve(folder: Path) -> None:
    """Allocate this worker's files. A write into a mapped file on a full disk would kill the process.

    Raises:
        OSError: the disk is full.

    """
    for kind, size in RESERVED_BYTES.items():
        draft = folder / f"{os.getpid()}.tmp"  # other workers must not read the file while it is empty
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            draft.replace(folder / f"{kind}_{os.getpid()}.db")
        finally:
            draft.unlink(missing_ok=True)


def remove_dead_gauges(folder: Path) -> None:
    """Remove the gauges of dead workers, because their streams are closed. Their counters stay."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(re.findall(r"\d+", file.name)[-1])
        if not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]


PROC = Path("/proc")
TICK_SECONDS, PAGE_BYTES = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
MAX_UNLIMITED_FDS = 2**20
"""Reported for a process without a limit of descriptors."""


class ProcessUsage(NamedTuple):
    """Resources of one process, or of several.

    Args:
        cpu_seconds: user and system time, ended child processes included.
        virtual_bytes: virtual memory.
        resident_bytes: resident memory; pages of several processes count for each.
        open_fds: open file descriptors.
        major_faults: page faults with a read from a disk, ended child processes included.
        start_seconds: time of the start after the start of the system.

    """

    cpu_seconds: float
    virtual_bytes: int
    resident_bytes: int
    open_fds: int
    major_faults: int
    start_seconds: float


class ProcessCollector(Collector):
    """Collects the metrics of the processes and of the build for each scrape."""

    def __init__(self) -> None:
        self._build = {
            "version": version("preblock"),
            "python_version": platform.python_version(),
            "onnxruntime_version": version_of("onnxruntime", "onnxruntime-gpu"),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield InfoMetricFamily("preblock_build", "Versions of the service and its libraries.", value=self._build)
        found = [usage for pid in service_processes() if (usage := read_usage(pid)) is not None]
        if not found:  # not on Linux
            return
        boot = float(re.findall(r"^btime (\d+)$", (PROC / "stat").read_text(), re.MULTILINE)[0])
        cpu = sum(usage.cpu_seconds for usage in found)
        yield CounterMetricFamily("process_cpu_seconds", "User and system time of all processes.", value=cpu)
        text = "Page faults of all processes that read from a disk."
        yield CounterMetricFamily("process_major_page_faults", text, value=sum(usage.major_faults for usage in found))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = MAX_UNLIMITED_FDS if limit == resource.RLIM_INFINITY else limit
        virtual, resident = sum(usage.virtual_bytes for usage in found), sum(usage.resident_bytes for usage in found)
        fds = sum(usage.open_fds for usage in found)
        start = boot + min(usage.start_seconds for usage in found)
        for name, text, value in (
            ("process_virtual_memory_bytes", "Virtual memory of all processes.", virtual),
            ("process_resident_memory_bytes", "Resident memory of all processes.", resident),
            ("process_open_fds", "Open file descriptors of all processes.", fds),
            ("process_max_fds", "Allowed file descriptors of all processes.", allowed * len(found)),
            ("process_start_time_seconds", "Start of the first process, in seconds since 1970.", start),
        ):
            yield GaugeMetricFamily(name, text, value=value)


def version_of(*packages: str) -> str:
    """Return the version of the first installed package; empty if there is none."""
    for package in packages:
        with suppress(ImportError):
            return version(package)
    return ""


def worker_processes() -> set[int]:
    """Return the ids of the serving processes; ended ones may be among them."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return {os.getpid()}
    return {int(found[1]) for file in Path(folder).iterdir() if (found := re.search(r"_(\d+)\.db$", file.name))}


def service_processes() -> set[int]:
    """Return the ids of all processes of the service: the workers, their fork server, and the parent of both."""
    workers = worker_processes()
    if FOLDER not in os.environ:
        return workers
    server = os.getppid()
    fields = read_stat(server)
    return workers | {server} | (set() if fields is None else {int(fields[1])})


def read_stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/PID/stat` after the name, from the state on (proc(5)); None if unknown."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def read_usage(pid: int) -> ProcessUsage | None:
    """Return the resources of a process; None if it has ended. The numbers of fields are those of proc(5), less 3."""
    fields = read_stat(pid)
    if fields is None:
        return None
    ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime and cstime
    open_fds = 0
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        open_fds = len(os.listdir(PROC / str(pid) / "fd"))  # noqa: PTH208 - a Path for each would take longer
    return ProcessUsage(
        cpu_seconds=ticks * TICK_SECONDS,
        virtual_bytes=int(fields[20]),
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        open_fds=open_fds,
        major_faults=int(fields[9]) + int(fields[10]),
        start_seconds=int(fields[19]) * TICK_SECONDS,
    )
