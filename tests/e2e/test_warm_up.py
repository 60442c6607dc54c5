"""Servers with a file of token ids whose n-gram rows are read at the start."""

from pathlib import Path

import httpx
import numpy as np

from tests.support.artifacts import copy_artifact
from tests.support.servers import serve


def test_rows_are_read_before_the_first_request(tmp_path: Path) -> None:
    root, file = tmp_path / "repository", tmp_path / "ids.npy"
    copy_artifact("ngrams", root)
    np.save(file, np.arange(50).reshape(2, 25))
    with serve(root, "--table-warm-up-file", str(file)) as server:
        metrics = httpx.get(f"{server.address}/metrics").text
        shape = httpx.get(f"{server.address}/models/ngrams").json()["manifest"]["graphs"]["ngram.ids.onnx"]["outputs"]
    rows = int(np.prod(shape[0]["shape"][2:])) * 50
    assert f"\npreblock_table_rows_total {rows}.0\n" in metrics
