"""Memory of a real GPU, which sessions take and give back, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.support.paths import ROOT

REOPEN = """
import gc, os, sys
from pathlib import Path
import numpy as np
from benchmarks.cuda.load import used_memory
from preblock.service.runtime.providers import CUDA, cuda_unavailable_reason
from preblock.service.runtime.session import open_session
assert cuda_unavailable_reason() is None
feeds = {"input_ids": np.array([[1, 2, 3]]), "offset": np.zeros(1, np.int64)}
found, used = set(), []
for _ in range(20):
    session = open_session(Path(sys.argv[1]), CUDA)
    session.warm_up(feeds)
    found.add(session.run(feeds)["embeddings"].tobytes())
    del session
    gc.collect()
    used.append(used_memory(os.getpid()))
print(len(found), used[1], used[-1])
"""


@pytest.mark.gpu
@pytest.mark.skipif(cuda_unavailable_reason() is not None, reason="CUDA does not work here")
def test_reopened_sessions_take_no_gpu_memory(tiny_repository: Path) -> None:
    """Each takes over the stream of the one before."""
    command = (sys.executable, "-c", REOPEN, tiny_repository / "gpt" / "1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    different, before, after = map(int, done.stdout.split())
    assert different == 1
    assert before > 0
    assert after - before < 16
