"""Rows read before a model is ready. The oracle is onnxruntime, which computes the row ids of whole sequences."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64
from preblock.service.runtime.ngram_rows import open_ngram_rows
from preblock.service.runtime.runner import Feeds
from preblock.service.runtime.session import Session
from preblock.service.runtime.table_memory import MIN_BUDGET_BYTES, TableMemory
from preblock.service.runtime.table_warm_up import read_token_ids, warm_up
from tests.support.artifacts import copy_artifact

VOCABULARY = 99
ROW_ID = "ngram_row_ids"


class Recorded:
    """Runs the graph of row ids, and keeps the ids."""

    def __init__(self, folder: Path) -> None:
        self._graph, self.ids = Session(folder, graph="ngram.ids.onnx"), set[tuple[int, int]]()

    def run(self, feeds: Feeds, outputs: Sequence[str], /) -> dict[str, NDArray[Any]]:
        found = self._graph.run(feeds, outputs)
        self.ids |= pairs_of(found[ROW_ID].view(np.int64))
        return found


def pairs_of(ids: Int64) -> set[tuple[int, int]]:
    """Return each layer and row of row ids (B, L, N, H)."""
    return {(layer, int(row)) for layer in range(ids.shape[2]) for row in np.unique(ids[:, :, layer])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_artifact("ngrams", tmp_path_factory.mktemp("ngrams"))


def run_warm_up(folder: Path, memory: TableMemory) -> set[tuple[int, int]]:
    """Warm up the tables in `folder`, and return the rows that were read."""
    manifest, graph = read_manifest(folder), Recorded(folder)
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
        (np.array([[{}]], object), r"cannot be read: Object arrays"),
    ],
)
def test_file_of_other_values_is_rejected(value: NDArray[Any], reason: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", value, allow_pickle=True)
    with pytest.raises(Invalid, match=rf"^table_warm_up_file \S+/ids\.npy {reason}"):
        read_token_ids(tmp_path / "ids.npy")


def test_file_that_cannot_be_read_is_rejected(tmp_path: Path) -> None:
    for content in (None, b"", b"text", b"\x93NUMPY", b"PK\x03\x04broken"):
        if content is not None:
            (tmp_path / "ids.npy").write_bytes(content)
        with pytest.raises(Invalid, match=r"^table_warm_up_file \S+/ids\.npy cannot be read: \S"):
            read_token_ids(tmp_path / "ids.npy")


def test_ids_of_a_file_are_read(tmp_path: Path) -> None:
    ids = np.arange(6).reshape(2, 3)
    np.save(tmp_path / "ids.npy", ids)
    assert np.array_equal(read_token_ids(tmp_path / "ids.npy"), ids)  # type: ignore[arg-type]
    assert read_token_ids(None) is None
