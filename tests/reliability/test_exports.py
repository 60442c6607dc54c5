"""Exports hold a table in memory once, and the same source gives the same bytes to different users in different places.

`make huge` measures larger tables, from float16 and from float32 to every type.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.backends.cpu import get_cpu_capability

from preblock.service.artifacts.io import read_with_identity
from preblock.service.artifacts.names import MANIFEST, PARITY
from tests.export.conftest import save_tiny
from tests.families.library_models import save
from tests.support.checkpoints import write_gpt2
from tests.support.paths import ROOT

ROWS, WIDTH, POSITIONS = 40960, 1024, 256
TABLE = ROWS * WIDTH * 4
"""Bytes in the artifact: 168 MB."""
PARTS = 150 * 10**6
"""Bytes of one compared chunk, and of memory kept by libraries: the same for every size of table."""

MEASURED = """
import ctypes, gc, json, sys
from pathlib import Path
from preblock.export.exporter import export
from preblock.export.verification import verify
def status(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
def peak(run):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier must not hide new use
    Path("/proc/self/clear_refs").write_text("5")
    base = status("VmRSS")
    run()
    return status("VmHWM") - base
sources, root = map(Path, sys.argv[1:])
verify(export(str(sources / "small"), "small", root, dtype="int8").folder)  # loads libraries before the measurement
found = {dtype: peak(lambda: export(str(sources / dtype), dtype, root)) for dtype in ("float16", "float32")}
found["verify"] = peak(lambda: verify(root / "float32" / "1"))
found["int8"] = peak(lambda: export(str(sources / "float32"), "int8", root, dtype="int8"))
found["verify int8"] = peak(lambda: verify(root / "int8" / "1"))
print(json.dumps(found))
"""
WORKER = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.runtime.session import Session
session = Session(Path(sys.argv[1]))
for ids in np.arange(int(sys.argv[2])).reshape(-1, 256):
    session.run({"input_ids": ids[None], "offset": np.zeros(1, np.int64)})
print("ready", flush=True)
sys.stdin.read()
"""


def write_checkpoint(folder: Path, rows: int, dtype: str) -> None:
    row = np.linspace(1, 2, WIDTH, dtype=np.float32)
    tables = (np.outer(np.linspace(1, 9, size, dtype=np.float32), row).astype(dtype) for size in (rows, POSITIONS))
    write_gpt2(folder, *tables)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """Peaks of three exports and of two proofs in bytes, and the repository."""
    root = tmp_path_factory.mktemp("memory")
    write_checkpoint(root / "sources" / "small", 256, "float16")
    for dtype in ("float16", "float32"):
        write_checkpoint(root / "sources" / dtype, ROWS, dtype)
    command = [sys.executable, "-c", MEASURED, str(root / "sources"), str(root / "repository")]
    yield json.loads(subprocess.check_output(command)), root / "repository"
    shutil.rmtree(root)


@pytest.mark.parametrize("what", ["float16", "float32", "int8", "verify", "verify int8"])
def test_export_and_verify_hold_the_table_once(measured: tuple[dict[str, Any], Path], what: str) -> None:
    """In verification, several sessions map a small data file."""
    assert measured[0][what] <= 1.2 * TABLE + PARTS


def test_worker_processes_share_memory_of_table(measured: tuple[dict[str, Any], Path]) -> None:
    folder = measured[1] / "float32" / "1"
    command = [sys.executable, "-c", WORKER, str(folder), str(ROWS)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
        held = [proportional(worker.pid, folder / "model.onnx.data") for worker in workers]
    finally:
        for worker in workers:
            worker.communicate(b"")
    assert min(held) > 0.3 * TABLE  # all of them read all of it
    assert sum(held) <= 1.05 * TABLE


def proportional(pid: int, file: Path) -> int:
    """Return the bytes of `file` in the memory of a process, with shared pages divided among their processes."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


EXPORT = """
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from preblock.export import export_module
from preblock.export.exporter import export
from tests.support.torchlib import read_once


class Own(nn.Module):
    '''A table, a constant, and a graph within the graph.'''

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(50, 16, generator=generator))
        self.register_buffer("constant", torch.randn(16, 16, generator=generator))

    def forward(self, input_ids, offset):
        positions = torch.arange(input_ids.shape[1]) + offset.reshape(-1, 1)
        x = torch.nn.functional.gelu(self.table[input_ids] + self.table[positions] @ self.constant)
        return torch.cond(offset.sum() > 3, lambda x: x * 2, lambda x: x + x, (x,))


read_once(pytest.MonkeyPatch())
sources, repository = Path(sys.argv[1]), Path(sys.argv[2])
names = ["bert", "ctrl", "own", "resized"]
for name in reversed(names) if sys.argv[3] == "reversed" else names:
    if name == "own":
        export_module(Own(), name, repository, vocab_size=50, max_len=50)
    elif name == "resized":
        export(str(sources / "bert"), name, repository, max_len=37, resizing="interpolate")
    else:
        export(str(sources / name), name, repository)
"""
NAMES = ["bert", "ctrl", "own", "resized"]
BLOCKS_OF_AVX2 = """
import numpy as np
import torch
from preblock.models.float32_powers import vector_powers
torch.set_num_threads(1)  # each thread would end with numbers outside of blocks
draw = np.random.default_rng(2)
bases, exponents = np.exp(draw.uniform(0, 25, 2**20)).astype(np.float32), draw.uniform(0, 1, 2**20).astype(np.float32)
expected = torch.pow(torch.from_numpy(bases), torch.from_numpy(exponents)).numpy()
print(torch.backends.cpu.get_cpu_capability(), np.array_equal(vector_powers(bases, exponents), expected))
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two repositories of the same four models."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second") / "deeper \u00e9"
    environments = {
        first: {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        second: {name: str(second / "home") for name in ("HOME", "TMPDIR")}
        | dict.fromkeys(("USER", "LOGNAME"), "somebody")
        | {
            "PYTHONHASHSEED": "4242",
            "OMP_NUM_THREADS": "3",
            "TZ": "Asia/Tokyo",
            "LC_ALL": "C",
            "SOURCE_DATE_EPOCH": "1",
        },
    }
    save("ctrl", first / "sources/ctrl")  # its sinusoids are computed in float32
    save_tiny(first / "sources/bert")
    running = []
    for place, environment in environments.items():
        (place / "home").mkdir(parents=True)
        if place == second:
            shutil.copytree(first / "sources", second / "sources")
        (place / "script.py").write_text(EXPORT)
        order = "reversed" if place == second else ""
        running.append(
            subprocess.Popen(
                [sys.executable, place / "script.py", place / "sources", place / "repository", order],
                cwd=place / "home",
                env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
                umask=0o077 if order else 0o022,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return first, second


def test_exports_by_different_users_have_same_bytes(repositories: tuple[Path, Path]) -> None:
    """They hold nothing of the machine. Different sources have different identities."""
    identities = set()
    for name in NAMES:
        first, second = (place / "repository" / name / "1" for place in repositories)
        files = {file.name for file in first.iterdir()}
        assert files == {file.name for file in second.iterdir()}
        for file in sorted(files):
            content = (first / file).read_bytes()
            assert file == PARITY or content == (second / file).read_bytes(), first / file
            for trace in (*(place.name for place in repositories), "script.py", "somebody", socket.gethostname()):
                assert trace.encode() not in content + (second / file).read_bytes(), (file, trace)
            for trace in (sys.prefix, str(ROOT), *([".py", "pkg.torch"] if file.endswith(".onnx") else [])):
                assert trace.encode() not in content, (file, trace)
        assert read_with_identity(first) == read_with_identity(second)
        identities.add(read_with_identity(first)[1])
    assert len(identities) == len(NAMES)


def test_identity_ignores_whitespace_and_key_order(repositories: tuple[Path, Path], tmp_path: Path) -> None:
    folder = repositories[0] / "repository/bert/1"
    record = json.loads((folder / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(dict(reversed(record.items())), indent=7))
    assert read_with_identity(tmp_path)[1] == read_with_identity(folder)[1]
    (tmp_path / MANIFEST).write_text(json.dumps(record | {"max_len": 1}))
    assert read_with_identity(tmp_path)[1] != read_with_identity(folder)[1]


@pytest.mark.skipif(get_cpu_capability() not in ("AVX512", "AVX2"), reason="the processor has no AVX2")
def test_powers_of_torch_have_same_bits_with_avx2() -> None:
    command, environment = [sys.executable, "-c", BLOCKS_OF_AVX2], {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "AVX2 True\n"
