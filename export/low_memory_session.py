"""A session to prove huge artifacts in little memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA
from preblock.service.runtime import session
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import Session

HUGE_BYTES = 2**27
"""Smallest data file, in bytes, to save memory for at the cost of time."""


class ReopeningSession(Session):
    """A session on the CPU, reopened after each run.

    The pages of the data file read by a run stay in memory until the session is closed.
    """

    def __init__(self, folder: Path, graph: str) -> None:
        self._of = folder, graph
        super().__init__(folder, graph=graph)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, Float32]:
        """Return the outputs of the graph, and reopen the session."""
        found = super().run(feeds, outputs)
        folder, graph = self._of
        super().__init__(folder, graph=graph)
        return found


def open_session(folder: Path, provider: str, graph: str) -> Session:
    """Open a graph in `folder` for a proof. On the CPU, a huge one is reopened after each run."""
    if provider == CPU and (folder / DATA).stat().st_size >= HUGE_BYTES:
        return ReopeningSession(folder, graph)
    return session.open_session(folder, provider, graph=graph)
