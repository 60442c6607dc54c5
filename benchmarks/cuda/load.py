"""Mixed load on a CUDA server, by `benchmarks.soak`: every bit is checked, and the device memory must not grow."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MOST_GROWTH = 16
"""Largest growth of the GPU's used memory from the first third of the load to the last, in MiB."""
USED = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Run the load, and return its report and the used memory of the GPU in MiB, once a second."""
    del artifacts
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", str(minutes)]
    command += ["--repository", str(work / "repository")]
    memory = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PREBLOCK_PROVIDER": "cuda"}
    ) as process:
        while process.poll() is None:
            memory.append(int(subprocess.run(USED, capture_output=True, text=True, check=True).stdout.split()[0]))
            time.sleep(1)
        assert process.stdout is not None
        report = process.stdout.read().splitlines()
    print("\n".join(report), flush=True)
    loaded = memory[10:-5]  # without the start and the end of the server
    third = len(loaded) // 3
    first, last = max(loaded[:third]), max(loaded[-third:])
    print(f"GPU memory in MiB: at most {first} in the first third, {last} in the last", flush=True)
    if process.returncode or last - first > MOST_GROWTH:
        raise SystemExit(f"the load failed: exit code {process.returncode}, memory grew by {last - first} MiB")
    return {"report": report, "first third": first, "last third": last, "memory": memory}
