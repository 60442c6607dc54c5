"""The measured system: server, model, and the machine of the load generator."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import httpx

from preblock.bench.workload import LoadTarget
from preblock.client.access import authorization
from preblock.client.results import Model

PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MeasuredSystem:
    """A server under load, as it describes itself, and the machine of the load generator.

    Args:
        server: name and version of the server; None if it does not tell.
        url: URL of the server.
        model: name of the model.
        version: its version.
        family: family of the model.
        provider: the onnxruntime provider in use.
        load_from: processor and number of usable cores of the machine of the load generator.

    """

    server: str | None
    url: str
    model: str
    version: int
    family: str
    provider: str
    load_from: str

    def summary(self) -> str:
        """Return the system in three lines."""
        return (
            f"server: {self.server or 'unknown'} at {self.url}\n"
            f"model: {self.model} version {self.version}, family {self.family}, on {self.provider}\n"
            f"load from: {self.load_from}"
        )


def describe_system(target: LoadTarget, model: Model, timeout: float) -> MeasuredSystem:
    """Return the system of `target`; `model` is the description of the model by the server."""
    return MeasuredSystem(
        server=_read_server(target, timeout),
        url=target.url,
        model=model.name,
        version=model.version,
        family=model.family,
        provider=model.provider,
        load_from=_describe_machine(),
    )


def _read_server(target: LoadTarget, timeout: float) -> str | None:
    """Return name and version of the server, from the metadata of the Open Inference Protocol."""
    try:
        answer = httpx.get(f"{target.url.rstrip('/')}/v2", headers=authorization(target.key), timeout=timeout)
        document = answer.raise_for_status().json()
        return f"{document['name']} {document['version']}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def _describe_machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()}"


def _processor() -> str:
    try:
        named = re.search(r"^model name\s*: (.+)$", PROCESSORS.read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        named = None
    return named[1].strip() if named else platform.machine()
