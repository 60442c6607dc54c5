"""A server and an engine over quantized artifacts."""

import asyncio
import base64
from pathlib import Path

import httpx
import numpy as np

from preblock.service.core.types import TokenRequest, TokenRows
from tests.export.quantization.rounding import ALL, WAYS, Array, rounded
from tests.support.engines import ask_engine, open_engine
from tests.support.servers import serve


@ALL
def test_engine_serves_quantized_artifact_with_ragged_rows(
    quantized_repository: Path, quantized_tables: tuple[Array, Array], way: str
) -> None:
    rows, offsets = [[5, 6, 7, 8], [9], [89, 0]], [0, 23, 4]
    ids = TokenRows(np.array([id_ for row in rows for id_ in row]), np.array([len(row) for row in rows]))
    request = TokenRequest(input_ids=ids, offset=np.array(offsets))
    with open_engine(quantized_repository) as engine:
        answer = asyncio.run(ask_engine(engine, engine.repository.get(way), request))
    tokens, positions = (rounded(table, way) for table in quantized_tables)
    expected = [tokens[row] + positions[at : at + len(row)] for row, at in zip(rows, offsets, strict=True)]
    assert np.array_equal(answer.arrays["embeddings"], np.concatenate(expected))


def test_server_converts_quantized_output_to_requested_dtype(
    quantized_repository: Path, quantized_tables: tuple[Array, Array]
) -> None:
    with serve(quantized_repository) as server:
        for way in WAYS:
            fields = {"input_ids": [[5, 6, 7]], "offset": 2, "dtype": "float16"}
            answer = httpx.post(f"{server.address}/models/{way}/embed", json=fields, timeout=60).json()
            tokens, positions = (rounded(table, way) for table in quantized_tables)
            expected = (tokens[[5, 6, 7]] + positions[2:5]).astype(np.float16)
            assert base64.b64decode(answer["embeddings"]) == expected.tobytes()
        shown = httpx.get(f"{server.address}/models/int4", timeout=60).json()
        assert shown["manifest"]["dtype"] == "int4"
        assert set(shown["parity"]["storage"]) == {"tokens.weight", "positions.weight"}
