"""Servers with a file of token ids whose n-gram rows are read at the start."""

import subprocess
from pathlib import Path

import httpx
import numpy as np

from tests.support.artifacts import copy_artifact
from tests.support.paths import PREBLOCK
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


def test_wrong_file_of_ids_fails_the_start(tmp_path: Path) -> None:
    root, file = tmp_path / "repository", tmp_path / "ids.npy"
    copy_artifact("ngrams", root)
    command = [PREBLOCK, "serve", "--repository", str(root), "--port", "0", "--table-warm-up-file", str(file)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    assert f"table_warm_up_file {file} cannot be read: " in refused.stderr
    assert "Traceback" not in refused.stderr
