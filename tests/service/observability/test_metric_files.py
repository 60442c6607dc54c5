"""Files of gauges and counters of the workers."""

import os
import subprocess
import sys
from pathlib import Path

from preblock.service.observability.metric_files import remove_dead_gauges


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
