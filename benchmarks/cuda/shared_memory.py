"""Tensors in memory of the GPU, beside shared memory and TCP, on a CUDA server: `benchmarks.shared_memory`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Return the lines of the benchmark."""
    del artifacts, minutes
    environment = os.environ | {"PREBLOCK_PROVIDER": "cuda", "PREBLOCK_REPOSITORY": str(work / "repository")}
    command = (sys.executable, "-m", "benchmarks.shared_memory", "--rounds", "5", "--requests", "10")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    print(done.stdout, flush=True)
    if "memory of a GPU" not in done.stdout:
        raise SystemExit(f"the benchmark failed with exit code {done.returncode}")
    return {"lines": done.stdout.splitlines()}
