"""Gauges of models, mapped tables, and resident memory of the processes."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from preblock.service.artifacts.names import DATA
from preblock.service.core.auth import SERVICE
from preblock.service.observability.process_metrics import worker_processes
from preblock.service.runtime.repository import Repository

KINDS = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
STATES = ("ready", "loading", "unavailable")


class ModelCollector(Collector):
    """Collects the gauges of models and memory for each scrape."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics."""
        tables = GaugeMetricFamily(
            "preblock_model_tables_bytes",
            "Size of the data file that the sessions of a model map; all processes share its pages.",
            labels=["model", "version"],
        )
        counts = Counter(state.state.lower() for state in self._repository.states())
        versions = GaugeMetricFamily("preblock_models", "Versions of models in the folder, by state.", labels=["state"])
        for state in STATES:
            versions.add_metric([state], counts[state])
        yield versions
        for model in self._repository.all(SERVICE):
            if DATA in model.manifest.files:
                tables.add_metric([model.name, str(model.version)], model.manifest.files[DATA].bytes)
        yield tables
        resident = GaugeMetricFamily(
            "preblock_resident_memory_bytes",
            "Memory of all workers that is resident, by kind; pages that several share count for each.",
            labels=["kind"],
        )
        for field, kind in KINDS.items():
            resident.add_metric([kind], sum(_resident(pid, field) for pid in worker_processes()))
        yield resident


def _resident(pid: int, field: str) -> int:
    """Return the resident bytes of one kind of a process (proc(5)); 0 if unknown."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return 0 if found is None else 1024 * int(found[1])
