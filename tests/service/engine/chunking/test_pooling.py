"""Pooling in chunks. Oracle: NumPy over the vectors of one run."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.runtime.session import INLINE_MAX_VALUES, Session
from tests.service.engine.chunking.requests import CASES, embed, rows_of, whole
from tests.support.engines import ask_engine


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_in_chunks_equals_pooled_rows(chunk_engine: Engine, case: str, pooling: str) -> None:
    lengths, offset = CASES[case]
    request = TokenRequest(
        input_ids=rows_of(lengths), offset=None if offset is None else np.array(offset), pooling=pooling
    )
    answer = embed(chunk_engine, "gpt", request)
    ends = np.cumsum(lengths)[:-1]
    rows = np.split(whole(chunk_engine, "gpt", request), ends)
    expected = {
        "mean": lambda row: (np.add.reduce(row, axis=0, dtype=np.float64) / len(row)).astype(np.float32),
        "first": lambda row: row[0],
        "last": lambda row: row[-1],
    }[pooling]
    np.testing.assert_array_equal(answer.arrays["embeddings"], np.stack(list(map(expected, rows))))


def test_pooling_applies_mask_of_each_row(chunk_engine: Engine) -> None:
    lengths = [100] * 90
    ids = rows_of(lengths)
    mask = np.random.default_rng(1).integers(0, 2, 9000)
    mask[::100] = 1
    many = TokenRequest(input_ids=ids, attention_mask=TokenRows(mask, ids.lengths), pooling="mean")
    found = embed(chunk_engine, "gpt", many).arrays["embeddings"]
    for row in (0, 41, 89):
        part = slice(100 * row, 100 * row + 100)
        one = TokenRows(ids.values[part], np.array([100]))
        alone = TokenRequest(input_ids=one, attention_mask=TokenRows(mask[part], one.lengths), pooling="mean")
        np.testing.assert_array_equal(embed(chunk_engine, "gpt", alone).arrays["embeddings"][0], found[row])


class Watched(Session):
    """Notes the largest number of values of a run."""

    most = 0

    def run(self, feeds: Mapping[str, NDArray[Any]], *outputs: Any) -> dict[str, NDArray[np.float32]]:
        found = super().run(feeds, *outputs)
        Watched.most = max(Watched.most, *(values.size for values in found.values()))
        return found


def test_pooling_of_long_row_uses_bounded_chunks(chunk_engine: Engine) -> None:
    model = chunk_engine.repository.get("llama")
    folder = chunk_engine.repository.root / "llama/1"
    sessions: dict[str, Session] = {graph: Watched(folder, graph=graph) for graph in model.sessions}
    watched = dataclasses.replace(model, sessions=sessions, lookup_table=None)
    request = TokenRequest(input_ids=rows_of([300, 1, 20000]), pooling="mean")
    found = asyncio.run(ask_engine(chunk_engine, watched, request)).arrays["embeddings"]
    assert 0 < Watched.most <= INLINE_MAX_VALUES
    session = model.sessions["model.onnx"]
    rows = np.split(request.input_ids.values, [300, 301])
    runs = [session.run({"input_ids": row[None], "offset": np.array([0])})["embeddings"][0] for row in rows]
    expected = [(np.add.reduce(run, axis=0, dtype=np.float64) / len(run)).astype(np.float32) for run in runs]
    assert found.tobytes() == np.stack(expected).tobytes()
    assert embed(chunk_engine, "llama", request).arrays["embeddings"].tobytes() == found.tobytes()  # from the table
