"""The measured system: server, model, and both machines."""

from dataclasses import dataclass
from typing import Any

import httpx

from preblock.bench.workload import LoadTarget
from preblock.client.access import authorization
from preblock.client.results import Model


@dataclass(frozen=True)
class MeasuredSystem:
    """A server under load, as it describes itself, and the machine of the load generator.

    Args:
        server: name and version of the server; None if it does not tell.
        url: URL of the server.
        workers: number of its processes; None if it does not tell.
        machine: its processor, usable cores and operating system; None if it does not tell.
        model: name of the model.
        version: its version.
        family: family of the model.
        provider: the onnxruntime provider in use.
        load_from: the machine of the load generator, described in the same way.

    """

    server: str | None
    url: str
    workers: int | None
    machine: str | None
    model: str
    version: int
    family: str
    provider: str
    load_from: str

    def summary(self) -> str:
        """Return the system in four lines."""
        workers = "unknown" if self.workers is None else self.workers
        return (
            f"server: {self.server or 'unknown'} at {self.url}\n"
            f"workers: {workers}, on {self.machine or 'an unknown machine'}\n"
            f"model: {self.model} version {self.version}, family {self.family}, on {self.provider}\n"
            f"load from: {self.load_from}"
        )


def describe_system(target: LoadTarget, model: Model, timeout: float) -> MeasuredSystem:
    """Return the system of `target`; `model` is the description of the model by the server."""
    from preblock.service.core.system import describe_machine

    index = _read_index(target, timeout)
    named = {"name", "version"} <= index.keys()
    return MeasuredSystem(
        server=f"{index['name']} {index['version']}" if named else None,
        url=target.url,
        workers=index.get("workers"),
        machine=index.get("machine"),
        model=model.name,
        version=model.version,
        family=model.family,
        provider=model.provider,
        load_from=describe_machine(),
    )


def _read_index(target: LoadTarget, timeout: float) -> dict[str, Any]:
    """Return the description of the server at its root; empty if it has none."""
    try:
        answer = httpx.get(f"{target.url.rstrip('/')}/", headers=authorization(target.key), timeout=timeout)
        index = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}
