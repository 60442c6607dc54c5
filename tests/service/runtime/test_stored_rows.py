"""Stored rows of large tables. Oracle: NumPy indexing over the whole table."""

import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.ngram_rows import Gather, KernelGather, NumpyGather, StoredRows
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory, read_file_pages

if BUILT:
    pass

built = pytest.mark.skipif(not BUILT, reason="_stored_rows.c was not built")
KINDS = [NumpyGather, *([KernelGather] if BUILT else [])]


def cut(table: NDArray[np.uint8], *ends: int) -> list[memoryview]:
    """Return a table in parts, cut at these rows."""
    return [memoryview(part.tobytes()) for part in np.split(table, ends)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row_bytes", [1, 63, 64, 65, 160, 5120])
@pytest.mark.parametrize("tokens", [0, 1, 400])
def test_rows_of_several_tables_in_parts(kind: type[Gather], row_bytes: int, tokens: int) -> None:
    random = np.random.default_rng([row_bytes, tokens])
    first = random.integers(0, 256, (100, row_bytes), np.uint8)
    second = random.integers(0, 256, (73, row_bytes), np.uint8)
    gather = kind([cut(first, 1, 40, 41, 99), cut(second)], row_bytes)
    ids = np.stack((random.integers(0, 100, (tokens, 3)), random.integers(0, 73, (tokens, 3))), 1)
    ids[:1, 0], ids[:1, 1] = [0, 99, 40], [0, 72, 1]
    out = np.full((tokens, 2, 3, row_bytes), 7, np.uint8)
    gather.run(ids, out)
    assert np.array_equal(out[:, 0], first[ids[:, 0]])
    assert np.array_equal(out[:, 1], second[ids[:, 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_id_without_a_row_is_rejected(kind: type[Gather]) -> None:
    tables = [cut(np.ones((9, 8), np.uint8)), cut(np.ones((5, 8), np.uint8), 2)]
    for id_ in (-1, 5, 2**63 - 1, -(2**63)):
        for at in (0, 3):
            ids, out = np.zeros((4, 2, 1), np.int64), np.full((4, 2, 1, 8), 7, np.uint8)
            ids[at, 1] = id_
            with pytest.raises(IndexError, match=f"^id: got {id_}, expected 0 to 4$"):
                kind(tables, 8).run(ids, out)
            assert (out[at, 1] == 7).all()


def write_table(file: Path, rows: int, row_bytes: int = 160) -> NDArray[np.uint8]:
    """Write a table of random rows, and return it."""
    table = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), np.uint8)
    file.write_bytes(table.tobytes())
    return table


def test_type_and_width_of_rows(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((50, 6), np.float32).astype(np.float16)
    (tmp_path / "t").write_bytes(table.tobytes())
    memory = TableMemory()
    rows = StoredRows([[memory.map(tmp_path / "t")]], table.dtype, 6, memory)
    ids = np.arange(12).reshape(4, 1, 3)
    assert np.array_equal(rows.gather(ids), table[ids].reshape(4, 1, 18))
    assert memory.take_use()[:2] == (12, 144)
    assert memory.take_use()[:2] == (0, 0)


def test_threads_do_not_interfere(tmp_path: Path) -> None:
    table, memory = write_table(tmp_path / "t", 5000), TableMemory()
    rows = StoredRows([[memory.map(tmp_path / "t")]], np.dtype(np.uint8), 160, memory)
    calls = [np.random.default_rng(seed).integers(0, 5000, (500, 1, 4)) for seed in range(20)]
    with ThreadPoolExecutor(8) as pool:
        for ids, found in zip(calls, pool.map(rows.gather, calls), strict=True):
            assert np.array_equal(found, table[ids].reshape(500, 1, 640))
    assert memory.take_use()[:2] == (40000, 40000 * 160)


def test_tables_are_mapped_from_the_file_and_shared(tmp_path: Path) -> None:
    write_table(tmp_path / "t", 1000)
    kept = TableMemory().map(tmp_path / "t")
    assert kept.readonly
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.endswith(str(tmp_path / "t"))] == ["r--s"]


@pytest.mark.parametrize("content", [None, b""])
def test_file_without_content_is_no_table(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"^t: got a file that cannot be mapped .*, expected a readable file"):
        TableMemory().map(tmp_path / "t")


@built
def test_shorter_file_is_an_error(tmp_path: Path) -> None:
    table, memory = write_table(tmp_path / "t", 5000), TableMemory()
    rows = StoredRows([[memory.map(tmp_path / "t")]], np.dtype(np.uint8), 160, memory)
    os.truncate(tmp_path / "t", 160 * 1000)
    for tokens in (1, 4000):  # the second call releases the GIL
        with pytest.raises(BufferError, match=r"^table: got a file that has become shorter, expected all its rows"):
            rows.gather(np.arange(4999, 4999 - tokens, -1).reshape(-1, 1, 1))
    ids = np.arange(900).reshape(-1, 1, 1)
    assert np.array_equal(rows.gather(ids), table[ids].reshape(-1, 1, 160))


BUDGETED = """
import sys
from pathlib import Path
import numpy as np
from preblock.service.runtime.ngram_rows import StoredRows
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory, read_file_pages
memory = TableMemory(int(sys.argv[2]) or None)
before = read_file_pages()
rows = StoredRows([[memory.map(Path(sys.argv[1]))]], np.dtype(np.uint8), 160, memory)
random, peak = np.random.default_rng(0), 0
for _ in range(25):
    rows.gather(random.integers(0, 6_000_000, (100, 1, 18)))
    assert abs(memory.resident_bytes - (read_file_pages() - before)) < 2**23
    peak = max(peak, read_file_pages() - before)
print(peak)
"""


def test_budget_bounds_resident_pages(tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    os.truncate(tmp_path / "t", 160 * 6_000_000)

    def peak(budget: int) -> int:
        command = [sys.executable, "-c", BUDGETED, str(tmp_path / "t"), str(budget)]
        return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout)

    assert peak(0) > 1.2 * MIN_BUDGET_BYTES
    assert peak(MIN_BUDGET_BYTES) <= 1.1 * MIN_BUDGET_BYTES


def test_resident_pages_are_counted() -> None:
    assert TableMemory().resident_bytes == 0
    with mmap.mmap(-1, 2**24) as shared:
        before = read_file_pages()
        shared.write(b"x" * 2**24)
        assert read_file_pages() - before >= 2**24
