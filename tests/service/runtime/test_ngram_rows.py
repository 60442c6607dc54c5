"""N-gram outputs from mapped tables. Oracles: onnxruntime for row ids, ml_dtypes and NumPy for rows and scales."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest, NgramTable, TablePart, TableScales
from preblock.service.artifacts.names import DATA
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.ngram_rows import NgramRows, open_ngram_rows
from preblock.service.runtime.session import Session
from preblock.service.runtime.table_memory import TableMemory
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


def test_outputs_of_copied_tables(folder: Path, manifest: Manifest, row_ids: NDArray[np.int64]) -> None:
    stored = "stored ngram_embeddings"
    found = open_rows(folder, manifest).run(FEEDS, ["ngram_embeddings", "ngram_row_ids", stored])
    expected = Session(folder, graph="ngrams.onnx").run(FEEDS)["ngram_embeddings"].reshape(3, 20, -1)
    assert list(found) == ["ngram_embeddings", "ngram_row_ids", stored]
    assert found["ngram_embeddings"].tobytes() == found[stored].tobytes() == expected.tobytes()
    assert np.array_equal(found["ngram_row_ids"], row_ids.reshape(3, 20, -1))


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
