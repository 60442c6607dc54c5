"""Row ids by NumPy. Oracle: the graph in onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest, NgramHash
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.session import Session
from tests.support.artifacts import copy_artifact

END = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_artifact("ngrams", tmp_path_factory.mktemp("ngrams"))


@pytest.fixture(scope="module")
def graph(folder: Path) -> Session:
    return Session(folder, graph="ngram.ids.onnx")


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert isinstance(found, Manifest)
    return found


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 2), (3, 40)])
def test_row_ids_are_those_of_the_graph(shape: tuple[int, int], graph: Session, manifest: Manifest) -> None:
    runner, random = open_ngram_ids(manifest, graph), np.random.default_rng(shape)
    for _ in range(30):
        ids, context = (random.integers(0, 99, (shape[0], length)) for length in (shape[1], 2))
        for values in (ids, context):
            values[random.random(values.shape) < 0.4] = END
        before = ids.copy()
        feeds: dict[str, NDArray[Any]] = {"input_ids": ids, "context": context}
        (found,) = runner.run(feeds, ["ngram_row_ids"]).values()
        expected = graph.run(feeds)["ngram_row_ids"]
        assert (found.dtype, found.shape) == (expected.dtype, (*shape, 2, 4))
        assert np.array_equal(found, expected)
        assert np.array_equal(ids, before)


FACTORS, ROWS = ((3, 5, 7), (9, 11, 13)), (((53, 59), (61, 67)), ((71, 73), (79, 83)))


@pytest.mark.parametrize(
    ("factors", "rows", "message"),
    [
        (FACTORS, ROWS, "ngram_hash: the hash gives other row ids than ngram.ids.onnx$"),
        (FACTORS[:1], ROWS, r"ngram_hash: got factors of \[3\] ids and rows of \[3, 3\] ids, expected 3 ids"),
        (((3, 5), (9, 11)), ROWS, r"ngram_hash: got factors of \[2, 2\] ids and rows of \[3, 3\] ids, expected 3"),
        (FACTORS, (ROWS[0], ROWS[1][:1]), r"ngram_hash: got factors of \[3, 3\] ids and rows of \[3, 2\] ids"),
        (FACTORS, (ROWS[0], ((71, 73), (79,))), r"ngram_hash: got heads of \[1, 2\] rows, expected one number"),
        (FACTORS, (((), ()), ((), ())), r"ngram_hash: got heads of \[0\] rows, expected one number"),
        (None, None, "ngram_hash: got nothing, expected the hash of ngram.ids.onnx, since there are ngram_tables$"),
        ((), (), r"ngram_hash: got factors of \[\] ids and rows of \[\] ids, expected 3 ids"),
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
