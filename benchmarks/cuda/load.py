"""Mixed load on a CUDA server, by `benchmarks.soak`: every bit is checked, and the device memory must not grow."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOST_GROWTH = 16
"""Largest growth of the server's GPU memory from the first third of the load to the last, in MiB."""
USED = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Run the load, and return its report and the server's GPU memory in MiB, once a second."""
    del artifacts
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", str(minutes)]
    command += ["--repository", str(work / "repository")]
    memory = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PREBLOCK_PROVIDER": "cuda"}
    ) as process:
        while process.poll() is None:
            memory.append(used_memory(process.pid))
            time.sleep(1)
        assert process.stdout is not None
        report = process.stdout.read().splitlines()
    print("\n".join(report), flush=True)
    loaded = memory[15:-10]  # without the start and the end of the server
    print("GPU memory in MiB:", *loaded[:: max(1, len(loaded) // 20)], flush=True)
    third = len(loaded) // 3
    first, last = max(loaded[:third]), max(loaded[-third:])
    print(f"GPU memory in MiB: at most {first} in the first third, {last} in the last", flush=True)
    if process.returncode or last - first > MOST_GROWTH:
        raise SystemExit(f"the load failed: exit code {process.returncode}, memory grew by {last - first} MiB")
    return {"report": report, "first third": first, "last third": last, "memory": memory}


def used_memory(pid: int) -> int:
    """Return the GPU memory of a process and its descendants, in MiB."""
    lines = subprocess.run(USED, capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = {int(process): int(size) for process, size in (line.split(", ") for line in lines)}
    return sum(sizes.get(process, 0) for process in family(pid))


def family(pid: int) -> set[int]:
    """Return the ids of a process and its descendants."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:  # it has ended
        return set()
    return {pid}.union(*map(family, children))
