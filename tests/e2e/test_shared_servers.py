"""The servers that all workers of a run share end with the run, also with a killed one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import alive
from tests.support.waiting import wait_until

RUN = """
import signal
import sys
from pathlib import Path
from tests.support.shared import sharing

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
with sharing() as (shared, _):
    print(shared.server("one", Path(sys.argv[1])).pid, shared.folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_shared_server_ends_with_its_run(tiny_repository: Path, number: int) -> None:
    command = [sys.executable, "-c", RUN, str(tiny_repository)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        assert alive(int(pid))
        os.kill(run.pid, number)
        run.wait(60)
    wait_until(lambda: not alive(int(pid)))
    assert Path(folder).exists() == (number == signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
