"""Large requests, and their vectors in one run of onnxruntime."""

import asyncio
from typing import TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from preblock.service.core.types import EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from tests.support.engines import ask_engine

T = TypeVar("T")
VOCABULARY, WIDTH, MAX_LEN = 300, 64, 5000
PADDING = 1
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows_of(lengths: list[int]) -> TokenRows:
    random = np.random.default_rng(len(lengths))
    return TokenRows(random.integers(8, VOCABULARY, sum(lengths)), np.array(lengths))


def embed(engine: Engine, model: str, request: TokenRequest) -> EmbedResult:
    return asyncio.run(ask_engine(engine, engine.repository.get(model), request))


def whole(engine: Engine, model: str, request: TokenRequest) -> NDArray[np.float32]:
    """The vectors of the tokens one after another, of one run for each row."""
    rows, session = request.input_ids, engine.repository.get(model).sessions["model.onnx"]
    found = []
    offsets = np.broadcast_to([0] if request.offset is None else request.offset, len(rows.lengths))
    for start, length, offset in zip(rows.starts, rows.lengths, offsets, strict=True):
        ids = rows.values[start : start + length].reshape(1, -1)
        feeds = {"input_ids": ids, "offset": np.array([offset]), "token_type_ids": np.zeros_like(ids)}
        found.append(session.run({tensor.name: feeds[tensor.name] for tensor in session.inputs})["embeddings"][0])
    return np.concatenate(found)


CASES = {
    "equal rows": ([100] * 90, None),
    "long rows": ([4100, 4100, 4100], None),
    "rows of one token": ([1] * 9000, None),
    "ragged": ([3, 4000, 1, 4999, 17, 1000], None),
    "offsets": ([4100, 4100, 4100], [5, 0, 800]),
    "one offset": ([100] * 90, [77]),
}
