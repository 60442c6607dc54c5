"""N-gram outputs: row ids by NumPy, rows of mapped tables, and rows read before a model is ready.

Oracles: onnxruntime for row ids, ml_dtypes and NumPy for rows and scales.
"""

import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest, NgramHash, NgramTable, TablePart, TableScales
from preblock.service.artifacts.names import DATA
from preblock.service.core.errors import ArtifactError, Invalid
from preblock.service.core.types import Int64
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.ngram_rows import NgramRows, open_ngram_rows
from preblock.service.runtime.runner import Feeds
from preblock.service.runtime.session import Session
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory
from preblock.service.runtime.table_warm_up import read_token_ids, warm_up
from tests.support.artifacts import copy_artifact

IDS = np.random.default_rng(5).integers(0, 99, (3, 20))
FEEDS = {"input_ids": IDS, "context": np.full((3, 2), 2)}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
Cuts = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_artifact("ngrams", tmp_path_factory.mktemp("ngrams"))


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert isinstance(found, Manifest)
    return found


@pytest.fixture(scope="module")
def row_ids(folder: Path) -> NDArray[np.int64]:
    """Return the row ids (B, L, N, H)."""
    return Session(folder, graph="ngram.ids.onnx").run(FEEDS)["ngram_row_ids"].view(np.int64)


def open_rows(folder: Path, manifest: Manifest, *tables: NgramTable) -> NgramRows:
    changed = manifest.model_copy(update={"ngram_tables": tables or manifest.ngram_tables})
    return open_ngram_rows(folder, changed, Session(folder, graph="ngram.ids.onnx"), TableMemory(), {})


def test_file_that_changed_since_its_check_is_rejected(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"model.onnx.data changed while it was opened$"):
        TableMemory().map(folder / DATA, (0, 0, 0, 0, 0))


def write_table(folder: Path, layer: int, rows: int, width: int, cuts: Cuts, block: tuple[int, int]) -> tuple[Any, ...]:
    """Write an FP8 table in parts, each in a file of its own with its scales.

    Returns:
        The record, the stored numbers (rows, width), the scales (rows, S) and the values (rows, width).

    """
    random = np.random.default_rng([layer, rows])
    numbers = random.standard_normal((rows, width), np.float32).astype(FLOAT8)
    parts, scales, begin = [], [], 0
    for end in (*cuts, rows):
        file, count = folder / f"{layer}-{begin}", end - begin
        block_rows, block_columns = block[0] or count, block[1] or width
        of_blocks = random.random((-(-count // block_rows), -(-width // block_columns)), np.float32)
        content = numbers[begin:end].tobytes()
        file.write_bytes(b"x" * 13 + content + of_blocks.tobytes())
        places = {"begin": 13 + len(content), "dtype": "float32"}
        own = TableScales(file=str(file), block_rows=block_rows, block_columns=block_columns, **places)
        parts.append(TablePart(file=str(file), begin=13, rows=count, scales=own))
        scales.append(of_blocks.repeat(block_rows, 0)[:count])
        begin = end
    of_rows = np.concatenate(scales)
    values = numbers.astype(np.float32) * of_rows.repeat(block[1] or width, 1)[:, :width]
    return NgramTable(rows=rows, width=width, dtype="float8_e4m3fn", parts=tuple(parts)), numbers, of_rows, values


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (128, 128), (7, 10)])
@pytest.mark.parametrize("cuts", [(), (50, 51, 130)])
def test_rows_of_float8_times_their_scales(
    block: tuple[int, int], cuts: Cuts, folder: Path, manifest: Manifest, row_ids: NDArray[np.int64], tmp_path: Path
) -> None:
    written = [
        write_table(tmp_path, layer, table.rows, table.width, cuts, block)
        for layer, table in enumerate(manifest.ngram_tables)
    ]
    names = ["ngram_embeddings", "ngram_scales", "stored ngram_embeddings"]
    found = open_rows(folder, manifest, *(table for table, *_ in written)).run(FEEDS, names)
    for name, place in zip(names, (3, 2, 1), strict=True):
        expected = np.stack([rows[place][row_ids[:, :, layer]] for layer, rows in enumerate(written)], 2)
        assert found[name].dtype == expected.dtype
        assert found[name].tobytes() == expected.tobytes()
    assert open_rows(folder, manifest, *(table for table, *_ in written)).run(FEEDS, names[1:2]).keys() == {names[1]}


def test_tables_of_several_types_are_rejected(folder: Path, manifest: Manifest) -> None:
    first, second = manifest.ngram_tables
    with pytest.raises(ArtifactError, match=r"ngram_tables: got float16 \d+; float32 \d+, expected one type"):
        open_rows(folder, manifest, first, second.model_copy(update={"dtype": "float16"}))


def test_graph_with_ids_beyond_the_table_is_an_error(folder: Path, manifest: Manifest) -> None:
    first, second = manifest.ngram_tables
    (part,) = second.parts
    short = second.model_copy(update={"rows": 3, "parts": (part.model_copy(update={"rows": 3}),)})
    with pytest.raises(ArtifactError, match=r"^a table of ngram_embeddings is broken: id: got \d+, expected 0 to 2$"):
        open_rows(folder, manifest, first, short).run(FEEDS, ["ngram_embeddings"])


@pytest.mark.skipif(not BUILT, reason="_stored_rows.c was not built")
def test_shorter_data_file_is_an_error(manifest: Manifest, tmp_path: Path) -> None:
    folder = copy_artifact("ngrams", tmp_path)
    rows = open_rows(folder, manifest)
    os.truncate(folder / DATA, 100)
    with pytest.raises(ArtifactError, match="a table of ngram_embeddings is broken: table: got a file that has become"):
        rows.run(FEEDS, ["ngram_embeddings"])


@pytest.fixture(scope="module")
def graph(folder: Path) -> Session:
    return Session(folder, graph="ngram.ids.onnx")


FACTORS, ROWS = ((3, 5, 7), (9, 11, 13)), (((53, 59), (61, 67)), ((71, 73), (79, 83)))


@pytest.mark.parametrize(
    ("factors", "rows", "message"),
    [
        (FACTORS, ROWS, "ngram_hash: the hash gives other row ids than ngram.ids.onnx$"),
        (FACTORS[:1], ROWS, r"ngram_hash: got factors of \[3\] ids and rows of \[3, 3\] ids, expected 3 ids"),
        (((3, 5), (9, 11)), ROWS, r"ngram_hash: got factors of \[2, 2\] ids and rows of \[3, 3\] ids, expected 3"),
        (FACTORS, (ROWS[0], ((71, 73), (79,))), r"ngram_hash: got heads of \[1, 2\] rows, expected one number"),
        (FACTORS, (((), ()), ((), ())), r"ngram_hash: got heads of \[0\] rows, expected one number"),
        (None, None, "ngram_hash: got nothing, expected the hash of ngram.ids.onnx, since there are ngram_tables$"),
        (((3, 5, 2**63), FACTORS[1]), ROWS, rf"ngram_hash: got {2**63}, expected 1 to {2**63 - 1}"),
    ],
)
def test_hash_that_contradicts_the_graph_is_rejected(
    factors: Any, rows: Any, message: str, graph: Session, manifest: Manifest
) -> None:
    hashing = None if factors is None else NgramHash(factors=factors, rows=rows)
    changed = manifest.model_copy(update={"ngram_hash": hashing})
    with pytest.raises(ArtifactError, match=f"^manifest.json {message}"):
        open_ngram_ids(changed, graph)


VOCABULARY = 99
ROW_ID = "ngram_row_ids"


class Recorded(Session):
    """Keeps the row ids."""

    ids: frozenset[tuple[int, int]] = frozenset()

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        found = super().run(feeds, outputs)
        self.ids |= pairs_of(found[ROW_ID].view(np.int64))
        return found


def pairs_of(ids: Int64) -> set[tuple[int, int]]:
    """Return each layer and row of row ids (B, L, N, H)."""
    return {(layer, int(row)) for layer in range(ids.shape[2]) for row in np.unique(ids[:, :, layer])}


def run_warm_up(folder: Path, memory: TableMemory) -> frozenset[tuple[int, int]]:
    """Warm up the tables in `folder`, and return the rows that were read."""
    manifest, graph = read_manifest(folder), Recorded(folder, graph="ngram.ids.onnx")
    assert isinstance(manifest, Manifest)
    rows = open_ngram_rows(folder, manifest, graph, memory, {})
    warm_up("model ngrams version 1", rows, manifest, memory)
    return graph.ids


@pytest.mark.parametrize("shape", [(1, 1), (2000, 2), (1, 2500), (2, 1024)])
@pytest.mark.parametrize("budget", [None, MIN_BUDGET_BYTES])
def test_warm_up_reads_rows_of_whole_sequences(
    folder: Path, shape: tuple[int, int], budget: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.random.default_rng(3).integers(0, VOCABULARY, shape)
    context = np.full((len(ids), 2), 2)
    feeds = {"input_ids": ids, "context": context}
    expected = Session(folder, graph="ngram.ids.onnx").run(feeds)[ROW_ID].view(np.int64)
    memory = TableMemory(budget, ids)
    with caplog.at_level(logging.INFO):
        assert run_warm_up(folder, memory) == pairs_of(expected)
    assert memory.take_use()[0] == expected.size
    assert f"model ngrams version 1: read the table rows of {ids.size} tokens in " in caplog.text


@pytest.mark.parametrize("ids", [[[VOCABULARY]], [[1, -1]]])
def test_ids_of_another_vocabulary_read_nothing(
    folder: Path, ids: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_warm_up(folder, TableMemory(None, np.array(ids))) == set()
    assert f"has ids from {min(ids[0])} to {max(ids[0])}, expected 0 to {VOCABULARY - 1}" in caplog.text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros((1, 2), np.int32), r"has int32 \[1, 2\], expected a \.npy file of token ids, int64 \[rows, length\]"),
        (np.zeros(3, np.int64), r"has int64 \[3\], expected"),
        (np.zeros((0, 3), np.int64), r"has int64 \[0, 3\], expected"),
        (np.array([[{}]], object), r"cannot be read: .* Python objects"),
    ],
)
def test_file_of_other_values_is_rejected(value: NDArray[Any], reason: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", value, allow_pickle=True)
    with pytest.raises(Invalid, match=rf"^table_warm_up_file \S+/ids\.npy {reason}"):
        read_token_ids(tmp_path / "ids.npy")


def test_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    short = io.BytesIO()
    write_array_header_1_0(short, {"shape": (2**40, 1), "fortran_order": False, "descr": "<i8"})
    broken = b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16
    for content in (None, b"", b"text", b"\x93NUMPY", b"PK\x03\x04broken", short.getvalue(), broken):
        if content is not None:
            (tmp_path / "ids.npy").write_bytes(content)
        with pytest.raises(Invalid, match=r"^table_warm_up_file \S+/ids\.npy cannot be read: \S"):
            read_token_ids(tmp_path / "ids.npy")
