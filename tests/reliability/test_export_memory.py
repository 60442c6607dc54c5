"""Memory of exports, and of processes sharing an artifact: a table is in memory once.

`make huge` holds the same of larger tables, from float16 and from float32 to every type.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

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
    folder.mkdir(parents=True)
    config = {"model_type": "gpt2", "vocab_size": rows, "n_embd": WIDTH, "n_positions": POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    row = np.linspace(1, 2, WIDTH, dtype=np.float32)
    sizes = {"wte.weight": rows, "wpe.weight": POSITIONS}
    tensors = {name: np.outer(np.linspace(1, 9, size, dtype=np.float32), row) for name, size in sizes.items()}
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")


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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_export_memory_holds_table_once(measured: tuple[dict[str, Any], Path], dtype: str) -> None:
    assert measured[0][dtype] <= 1.2 * TABLE + PARTS


def test_int8_export_memory_holds_source_table_once(measured: tuple[dict[str, Any], Path]) -> None:
    assert measured[0]["int8"] <= 1.2 * TABLE + PARTS


@pytest.mark.parametrize("name", ["verify", "verify int8"])  # a small data file is mapped by several sessions
def test_verify_memory_holds_table_once(measured: tuple[dict[str, Any], Path], name: str) -> None:
    assert measured[0][name] <= 1.2 * TABLE + PARTS


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
