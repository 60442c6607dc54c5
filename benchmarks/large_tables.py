"""Tables of 2 GB and 4 GB: memory and time of export and verification, time to open, memory of several workers.

    python -m benchmarks.large_tables FOLDER [DTYPE]

Makes FOLDER, uses 14 GB in it, and removes it. Linux only. The checkpoints are GPT-2 with a table of 262144 x 4096 and
1024 learned positions, in float16 and in float32; the artifact stores DTYPE, default float32. The figures go to
standard output as Markdown. Exits with 1 if an export or a verification needs more memory than 1.2 times the larger of
checkpoint and data file, plus 180 MB for compared chunks and libraries.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH, POSITIONS = 262144, 4096, 1024
WORKERS = 4
MOST_MEMORY, OVERHEAD_BYTES = 1.2, 180 * 10**6
"""Largest ratio of the memory to the larger file, and the bytes allowed beside it for compared chunks and libraries."""

BEGIN = """
import json, sys, time
from pathlib import Path
import torch
def status(name):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
base, begin = status("VmRSS"), time.perf_counter()
"""
END = """
print(json.dumps({"seconds": time.perf_counter() - begin, "peak": status("VmHWM") - base}))
"""
EXPORT = f"""{BEGIN}
from preblock.export.exporter import export
export(sys.argv[1], "huge", Path(sys.argv[2]), dtype=sys.argv[3])
{END}"""
VERIFY = f"""{BEGIN}
from preblock.export.verification import verify
verify(Path(sys.argv[1]) / "huge" / "1")
{END}"""
OPEN = """
import json, sys, time
from pathlib import Path
from preblock.service.runtime.repository import Repository
begin = time.perf_counter()
Repository(Path(sys.argv[1]), cache=Path(sys.argv[2]))
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""
WORK = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.runtime.session import Session
session = Session(Path(sys.argv[1]) / "huge" / "1")
rows = int(sys.argv[2])
for ids in np.arange(rows).reshape(-1, 256):
    session.run({"input_ids": ids[None], "offset": np.zeros(1, np.int64)})
print("{}", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Measure, and print two columns."""
    folder, stored = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "float32"
    folder.mkdir(parents=True)
    try:
        columns = [measure(folder / dtype, dtype, stored) for dtype in ("float16", "float32")]
    finally:
        shutil.rmtree(folder)
    print(f"| {ROWS} x {WIDTH}, stored in {stored} | float16 in the file | float32 in the file |\n|---|---|---|")
    for name in columns[0]:
        print(f"| {name} | {columns[0][name]} | {columns[1][name]} |")


def measure(folder: Path, dtype: str, stored: str) -> dict[str, str]:
    """Return the figures of one table by name; `dtype` is its type in the checkpoint, `stored` in the artifact."""
    source, repository, cache = folder / "source", folder / "repository", folder / "cache"
    write_checkpoint(source, dtype)
    exported = run(EXPORT, source, repository, stored)
    data = repository / "huge" / "1" / "model.onnx.data"
    size = data.stat().st_size
    larger = max(size, (source / "model.safetensors").stat().st_size)
    shutil.rmtree(source)
    verified = run(VERIFY, repository)
    # The cache ignores files younger than two seconds; this one is older.
    first, again = (run(OPEN, repository, cache) for _ in range(2))
    shared = shared_memory(data, repository)
    for what, found in (("export", exported), ("verify", verified)):
        if found["peak"] > MOST_MEMORY * larger + OVERHEAD_BYTES:
            raise SystemExit(f"{what} of {dtype} stored in {stored}: {found['peak']} bytes, for a file of {larger}")
    shutil.rmtree(folder)
    return {
        "data file": f"{size / 1e9:.2f} GB",
        "export": f"{exported['seconds']:.0f} s",
        "peak of the export": f"{exported['peak'] / larger:.2f} x the larger file",
        "verify": f"{verified['seconds']:.0f} s",
        "peak of verify": f"{verified['peak'] / size:.2f} x the data file",
        "open, hashing": f"{first['seconds']:.1f} s",
        "open, checked before": f"{again['seconds'] * 1000:.0f} ms",
        f"data file in the memory of {WORKERS} processes": f"{shared / size:.2f} x the data file",
    }


def run(code: str, *arguments: Path | str) -> dict[str, Any]:
    """Run Python code in a new process, and return the JSON document of its output."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_checkpoint(folder: Path, dtype: str) -> None:
    """Write a GPT-2 checkpoint of random values without blocks, row by row."""
    folder.mkdir(parents=True)
    config = {"model_type": "gpt2", "vocab_size": ROWS, "n_embd": WIDTH, "n_positions": POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    header, end, kind = {}, 0, np.dtype(dtype)
    for name, rows in (("wte.weight", ROWS), ("wpe.weight", POSITIONS)):
        begin, end = end, end + rows * WIDTH * kind.itemsize
        header[name] = {"dtype": f"F{8 * kind.itemsize}", "shape": [rows, WIDTH], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.Generator(np.random.PCG64(0))
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _ in range((ROWS + POSITIONS) // 1024):
            stream.write(generator.standard_normal((1024, WIDTH), np.float32).astype(kind).tobytes())


def shared_memory(data: Path, repository: Path) -> int:
    """Return the bytes of `data` in the memory of several processes after each read the whole file."""
    command = [sys.executable, "-c", WORK, str(repository), str(ROWS)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(WORKERS)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"{}\n"
        return sum(proportional(worker.pid, data) for worker in workers)
    finally:
        for worker in workers:
            worker.communicate(b"")


def proportional(pid: int, file: Path) -> int:
    """Return the proportional set size of `file` in a process, in bytes."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(file.resolve()))
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    main()
