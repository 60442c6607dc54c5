"""Memory of a real GPU, which sessions take and give back, each test in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.support.paths import ROOT

THREADS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
import numpy as np
from benchmarks.cuda.load import used_memory
from preblock.service.runtime.providers import CUDA, cuda_unavailable_reason
from preblock.service.runtime.session import open_session
assert cuda_unavailable_reason() is None
session = open_session(Path(sys.argv[1]), CUDA)
feeds = {"input_ids": np.zeros((1, 4), np.int64), "offset": np.zeros(1, np.int64)}
together = Barrier(8)
def call(_):
    together.wait()
    session.run(feeds)
session.warm_up(feeds)
before = used_memory(os.getpid())
with ThreadPoolExecutor(8) as pool:
    list(pool.map(call, range(64)))
    print(before, used_memory(os.getpid()))
"""
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


def run_on_gpu(code: str, repository: Path) -> str:
    command = (sys.executable, "-c", code, repository / "gpt" / "1")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.gpu
@pytest.mark.skipif(cuda_unavailable_reason() is not None, reason="CUDA does not work here")
def test_calls_of_many_threads_take_no_gpu_memory(tiny_repository: Path) -> None:
    before, after = map(int, run_on_gpu(THREADS, tiny_repository).split())
    assert before > 0
    assert after - before < 16


@pytest.mark.gpu
@pytest.mark.skipif(cuda_unavailable_reason() is not None, reason="CUDA does not work here")
def test_sessions_one_after_another_take_no_gpu_memory(tiny_repository: Path) -> None:
    """Each takes over the stream of the one before."""
    different, before, after = map(int, run_on_gpu(REOPEN, tiny_repository).split())
    assert different == 1
    assert before > 0
    assert after - before < 16
