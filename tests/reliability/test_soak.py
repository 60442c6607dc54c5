"""The soak of `benchmarks/soak/`, short; `docs/benchmarks.md` tells of the long one."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak import run as soak
from benchmarks.soak.common import Soak, SoakFailure, Truth
from tests.support.paths import ROOT
from tests.support.servers import Server


def test_soak_of_3000_steps_passes(model_repository: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--steps", "3000", "--clients", "1"]
    # The C library's own memory for large answers grows for some minutes.
    arguments = ["--repository", str(model_repository), "--seed", "3", "--growth", "200"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, *protocols, counts, memory = done.stdout.splitlines()
    assert int(steps.split()[0]) >= 3000
    for name, line in zip(soak.PROTOCOLS, protocols, strict=True):
        assert re.fullmatch(rf"{name}: [1-9]\d* right, [1-9]\d* refused, \d+ broken off", line), line
    for what in ("append", "compressed", "drop", "large", "left", "reorder", "repeated", "rewind", "sequences"):
        assert f" {what}" in counts, counts
    assert "MiB" in memory


@pytest.mark.parametrize("protocol", soak.PROTOCOLS)
def test_soak_detects_wrong_response_bit(model_server: Server, model_repository: Path, protocol: str) -> None:
    truth = Truth(model_repository / "gpt2-small" / "1")
    truth.positions = truth.positions.copy()
    truth.positions.view(np.uint32)[:, 5] ^= 1
    served = soak.SoakTarget(model_server.address.removeprefix("http://"), model_server.grpc, model_server.pid)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(soak.run(Soak(truth, "gpt2-small", 1000), served, 1, 0, 0, [protocol]))
    assert all(isinstance(error, SoakFailure) for error in raised.value.exceptions)
