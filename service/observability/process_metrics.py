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
FAULTS, TIMES, START, VIRTUAL, RESIDENT = (9, 10), (11, 12, 13, 14), 19, 20, 21
"""Places in the result of `read_stat`; ended child processes count, too. proc(5) counts from 3 more."""


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
        found = {pid: fields for pid in service_processes() if (fields := read_stat(pid)) is not None}
        if not found:  # not on Linux
            return

        def total(*places: int) -> int:
            return sum(int(fields[place]) for fields in found.values() for place in places)

        boot = float(re.findall(r"^btime (\d+)$", (PROC / "stat").read_text(), re.MULTILINE)[0])
        start = boot + min(int(fields[START]) for fields in found.values()) * TICK_SECONDS
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = MAX_UNLIMITED_FDS if limit == resource.RLIM_INFINITY else limit
        cpu, resident = total(*TIMES) * TICK_SECONDS, total(RESIDENT) * PAGE_BYTES
        yield CounterMetricFamily("process_cpu_seconds", "User and system time of all processes.", value=cpu)
        text = "Page faults of all processes that read from a disk."
        yield CounterMetricFamily("process_major_page_faults", text, value=total(*FAULTS))
        for name, text, value in (
            ("virtual_memory_bytes", "Virtual memory of all processes.", total(VIRTUAL)),
            ("resident_memory_bytes", "Resident memory of all processes.", resident),
            ("open_fds", "Open file descriptors of all processes.", sum(map(count_descriptors, found))),
            ("max_fds", "Allowed file descriptors of all processes.", allowed * len(found)),
            ("start_time_seconds", "Start of the first process, in seconds since 1970.", start),
        ):
            yield GaugeMetricFamily(f"process_{name}", text, value=value)


def version_of(*packages: str) -> str:
    """Return the version of the first installed package; empty if there is none."""
    for package in packages:
        with suppress(ImportError):
            return version(package)
    return ""


def worker_processes() -> set[int]:
    """Return the ids of the serving processes."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return {os.getpid()}
    named = {int(found[1]) for file in Path(folder).iterdir() if (found := re.search(r"_(\d+)\.db$", file.name))}
    # Any process may have got the id of an ended worker.
    return {pid for pid in named if (fields := read_stat(pid)) is not None and int(fields[1]) == os.getppid()}


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


def count_descriptors(pid: int) -> int:
    """Return the number of open file descriptors of a process; 0 if it has ended."""
    try:
        return len(os.listdir(PROC / str(pid) / "fd"))  # noqa: PTH208 - a Path for each would take longer
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
