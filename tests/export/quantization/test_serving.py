"""A server and an engine over quantized artifacts."""

import base64
from pathlib import Path

import httpx
import numpy as np

from tests.export.quantization.rounding import WAYS, Array, rounded
from tests.support.servers import serve


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
