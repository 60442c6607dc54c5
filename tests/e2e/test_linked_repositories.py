"""A server on a repository of links, as a storage initializer of KServe makes it."""

import os
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.artifacts import copy_artifact, read_tables
from tests.support.servers import serve
from tests.support.waiting import wait_until

NPY = {"Accept": "application/octet-stream"}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a repository of a linked version folder, whose files have two names."""
    source = copy_artifact("gpt-100x32x50", tmp_path / "source", "gpt")
    shutil.copytree(source, tmp_path / "models/.versions/a1b2", copy_function=os.link)
    (tmp_path / "models/gpt").mkdir()
    (tmp_path / "models/gpt/1").symlink_to("../.versions/a1b2")
    return tmp_path / "models"


def embed(address: str, output: str) -> bytes:
    body = {"input_ids": [[7, 8, 9]], "output": output}
    return httpx.post(f"{address}/models/gpt/embed", json=body, headers=NPY).raise_for_status().content


def test_linked_version_has_the_bits_of_its_tables(linked: Path) -> None:
    tables = read_tables(copy_artifact("gpt-100x32x50", linked.parent / "copy"))  # onnx reads no hard links
    with serve(linked, "--alias", "service=gpt") as server:
        assert httpx.get(f"{server.address}/v2/models/service/ready").status_code == 200
        assert embed(server.address, "token_embeddings") == tables["tokens"][[7, 8, 9]].tobytes()
        expected = tables["tokens"][[7, 8, 9]] + tables["positions"][:3]
        assert np.array_equal(np.frombuffer(embed(server.address, "embeddings"), np.float32), expected.ravel())


def test_version_stops_if_data_changes_through_its_other_name(linked: Path) -> None:
    options = ("--model-control", "poll", "--model-poll-interval-seconds", "0.2")
    with serve(linked, *options) as server:
        before = embed(server.address, "embeddings")
        os.link(linked / "gpt/1/model.onnx.data", linked.parent / "third")  # a further name changes nothing
        assert embed(server.address, "embeddings") == before
        with (linked.parent / "source/gpt/1/model.onnx.data").open("r+b") as file:
            file.write(b"changed")
        wait_until(lambda: httpx.get(f"{server.address}/v2/models/gpt/ready").status_code != 200)


def test_linked_file_is_refused_with_its_name(linked: Path) -> None:
    graph = linked / "gpt/1/model.onnx"
    graph.unlink()
    graph.symlink_to(linked.parent / "source/gpt/1/model.onnx")
    with (
        pytest.raises(AssertionError, match=r"gpt/1/model\.onnx is a link to .*, expected a file in its folder"),
        serve(linked),
    ):
        pass
