"""The soak of `benchmarks/soak.py`, short; `docs/benchmarks.md` tells of the long one."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import soak
from tests.conftest import ROOT, Server


def test_two_thousand_steps(repository: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "2000", "--streams", "1"]
    arguments = ["--repository", str(repository), "--seed", "3"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, counts, memory = done.stdout.splitlines()
    assert int(steps.split()[0]) >= 2000
    for what in ("append", "bad", "breaks", "drop", "events", "left", "reorder", "repeated", "rewind"):
        assert f" {what}" in counts, counts
    assert "MiB" in memory


def test_one_wrong_bit_is_seen(server: Server, repository: Path) -> None:
    truth = soak.Truth(repository / "gpt2-small" / "1")
    truth.positions = truth.positions.copy()
    truth.positions.view(np.uint32)[:, 5] ^= 1
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(soak.run(truth, "gpt2-small", server.address, server.process.pid, 100, 1, 0))
    assert all(isinstance(error, soak.Wrong) for error in raised.value.exceptions)


def test_other_front_ends_are_refused(repository: Path) -> None:
    with pytest.raises(SystemExit, match=r"allowed tokens and positions in float32"):
        soak.Truth(repository / "minilm" / "1")
