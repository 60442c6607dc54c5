"""Files of the metrics that several workers share."""

import os
import re
from pathlib import Path

from prometheus_client import multiprocess

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


RESERVED = {"counter": 2**20, "histogram": 2**18, "gauge_livesum": 2**16, "gauge_max": 2**16}
"""Bytes of the files of a worker, by their kind: enough for ten versions of models with batches of all sizes."""


def reserve(folder: Path) -> None:
    """Take the room that this worker's numbers need: on a full disk, a write into a file that is mapped ends a process.

    Raises:
        OSError: there is not as much.

    """
    for kind, size in RESERVED.items():
        draft = folder / f"{os.getpid()}.tmp"  # whoever reads the others takes no empty file for one of them
        try:
            with draft.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            draft.replace(folder / f"{kind}_{os.getpid()}.db")
        finally:
            draft.unlink(missing_ok=True)


def _forget_dead(folder: Path) -> None:
    """Drop the gauges of workers that died: their streams are gone. Their counters stay."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = int(re.findall(r"\d+", file.name)[-1])
        if not Path(f"/proc/{pid}").exists():
            multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
