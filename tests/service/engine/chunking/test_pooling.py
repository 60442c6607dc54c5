"""Pooling in chunks. Oracle: NumPy over the vectors of one run."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.runtime.session import INLINE_MAX_VALUES, Session
from tests.service.engine.chunking.requests import CASES, embed, rows_of, whole
from tests.support.engines import ask_engine


@pytest.mark.parametrize("case", CASES)
def test_pooling_in_chunks_equals_pooled_rows(chunk_engine: Engine, case: str) -> None:
    lengths, offset = CASES[case]
    given = None if offset is None else np.array(offset)
    request = TokenRequest(input_ids=rows_of(lengths), offset=given)
    rows = np.split(whole(chunk_engine, "gpt", request), np.cumsum(lengths)[:-1])
    for pooling, pool in (("mean", mean), ("first", lambda row: row[0]), ("last", lambda row: row[-1])):
        found = embed(chunk_engine, "gpt", dataclasses.replace(request, pooling=pooling)).arrays["embeddings"]
        np.testing.assert_array_equal(found, np.stack([pool(row) for row in rows]), pooling)


def mean(row: NDArray[np.float32]) -> NDArray[np.float32]:
    total: NDArray[np.float64] = np.add.reduce(row, axis=0, dtype=np.float64)
    return (total / len(row)).astype(np.float32)


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
    assert found.tobytes() == np.stack([mean(run) for run in runs]).tobytes()
    assert embed(chunk_engine, "llama", request).arrays["embeddings"].tobytes() == found.tobytes()  # from the table
