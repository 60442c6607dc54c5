"""The service tests that fit a GPU: servers on CUDA, strict and auto, and the refusals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNS = {
    "cuda": ("tests/clients/shared_memory", "tests/service"),
    "auto": ("tests/cli/test_serve_command.py", "tests/service/runtime"),
}
"""Folders of tests by provider."""
SECONDS = 200
"""Longest time of a run; later tests are left out."""


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Run the tests with each provider, and return the totals and the failures."""
    del artifacts, minutes
    found: dict[str, Any] = {}
    for provider, folders in RUNS.items():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "12",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "-p",
            "no:benchmark",
            *folders,
        ]
        log = work / "results" / f"tests-{provider}.log"
        with log.open("w") as file:
            environment = os.environ | {"PREBLOCK_PROVIDER": provider}
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest then reports the failures so far
                process.wait()
        lines = log.read_text().splitlines()
        failed = sorted({line.split(" - ")[0] for line in lines if re.match("FAILED|ERROR", line)})
        found[provider] = {"last line": lines[-1] if lines else "", "failed": failed}
        print(provider, found[provider]["last line"], *failed, sep="\n", flush=True)
    if any(run["failed"] or "passed" not in run["last line"] for run in found.values()):
        raise SystemExit(f"tests failed; see {work / 'results'}/tests-*.log")
    return found
