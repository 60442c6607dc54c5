"""Servers of artifacts whose files lie outside, or are read at the start."""

import os
from pathlib import Path

import httpx
import numpy as np
from tritonclient.grpc import InferenceServerClient

from tests.support.artifacts import copy_artifact
from tests.support.references import SHARD, make_referenced
from tests.support.servers import serve
from tests.support.waiting import wait_until


def test_changed_file_takes_the_version_out_of_service(tmp_path: Path) -> None:
    root, shard = tmp_path / "repository", tmp_path / "checkpoint" / SHARD
    make_referenced(root, shard.parent)
    copy_artifact("gpt", root)
    options = ("--reference-roots", str(shard.parent), "--model-poll-interval-seconds", "0.1")
    with serve(root, *options) as server, httpx.Client(base_url=server.address, timeout=60) as client:

        def status(model: str) -> int:
            return client.post(f"/models/{model}/embed", json={"input_ids": [1]}).status_code

        description = client.get("/models/ngrams").json()
        assert description["references_checked"] == "header"
        assert list(description["manifest"]["references"]) == [str(shard)]
        assert (status("ngrams"), status("gpt")) == (200, 200)
        os.utime(shard)
        wait_until(lambda: status("ngrams") != 200)
        refused = client.post("/models/ngrams/embed", json={"input_ids": [1]})
        assert refused.status_code == 503
        assert refused.json()["detail"].startswith("ngrams/1 is out of service: a file that it refers to has changed")
        assert str(shard) not in refused.text
        assert [client.get(path).status_code for path in ("/models/ngrams", "/v2/models/ngrams/ready")] == [503, 503]
        listed = {model["name"]: model["ready"] for model in client.get("/models").json()}
        with InferenceServerClient(server.grpc) as calls:
            assert listed == {name: calls.is_model_ready(name) for name in listed} == {"gpt": True, "ngrams": False}
        assert status("gpt") == 200


def test_rows_are_read_before_the_first_request(tmp_path: Path) -> None:
    root, file = tmp_path / "repository", tmp_path / "ids.npy"
    copy_artifact("ngrams", root)
    np.save(file, np.arange(50).reshape(2, 25))
    with serve(root, "--table-warm-up-file", str(file)) as server:
        metrics = httpx.get(f"{server.address}/metrics").text
        shape = httpx.get(f"{server.address}/models/ngrams").json()["manifest"]["graphs"]["ngram.ids.onnx"]["outputs"]
    rows = int(np.prod(shape[0]["shape"][2:])) * 50
    assert f"\npreblock_table_rows_total {rows}.0\n" in metrics
    assert f"\npreblock_table_row_bytes_total {64 * rows}.0\n" in metrics
    assert "\npreblock_table_resident_bytes 0.0\n" not in metrics
