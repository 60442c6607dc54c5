"""Files of the metrics of several workers."""

import os
import re
from pathlib import Path

from prometheus_client import multiprocess

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
