"""Versions whose tables lie in a file outside, while it changes, disappears and returns."""

import os
from pathlib import Path

import numpy as np
import pytest

from preblock.service.core.errors import ArtifactError, NotFound, Unavailable
from tests.support.references import SHARD, make_referenced, open_repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact of the model `ngrams`."""
    return make_referenced(tmp_path / "repository", tmp_path / "checkpoint")


@pytest.fixture
def shard(folder: Path) -> Path:
    """The file with its tables."""
    return folder.parents[2] / "checkpoint" / SHARD


def test_changed_file_takes_the_version_out_of_service(
    folder: Path, shard: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = open_repository(folder, shard.parent)
    calls: list[int] = []
    repository.listeners.append(lambda: calls.append(1))
    repository.drop_changed()
    assert repository.get("ngrams").version == 1
    assert not calls
    status = shard.stat()
    os.utime(shard)
    repository.drop_changed()
    with pytest.raises(Unavailable, match=r"^ngrams/1 is out of service: a file that it refers to has changed"):
        repository.get("ngrams")
    with pytest.raises(Unavailable):
        repository.find("ngrams", "1")
    with pytest.raises(NotFound):
        repository.find("ngrams", "2")
    assert len(calls) == 1
    assert f"model ngrams version 1 is out of service: ngrams/1/references {shard}: got a change" in caplog.text
    (state,) = repository.refresh()
    assert (state.state, "time of change" in state.reason) == ("UNAVAILABLE", True)
    with pytest.raises(Unavailable):
        repository.get("ngrams")
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    (state,) = repository.refresh()
    assert state.state == "READY"
    assert repository.get("ngrams").version == 1


def test_file_that_returns_brings_the_version_back(folder: Path, shard: Path, tmp_path: Path) -> None:
    repository = open_repository(folder, shard.parent)
    model, feeds = repository.get("ngrams"), {"input_ids": np.array([[5]]), "context": np.full((1, 2), 2)}
    assert model.run(feeds, ("ngram_row_ids",))
    shard.parent.rename(tmp_path / "away")
    repository.drop_changed()
    with pytest.raises(Unavailable):
        repository.get("ngrams")
    with pytest.raises(ArtifactError, match="a table of ngram_embeddings has changed since it was opened"):
        model.run(feeds, ("ngram_row_ids",))  # as an open stream does
    (tmp_path / "away").rename(shard.parent)
    (state,) = repository.refresh()
    assert state.state == "READY"
    assert repository.get("ngrams").run(feeds, ("ngram_row_ids",))


def test_model_stays_open_beside_a_broken_new_manifest(folder: Path, shard: Path) -> None:
    repository = open_repository(folder, shard.parent)
    (folder / "manifest.json").write_text("{")
    repository.refresh()
    repository.drop_changed()
    assert repository.get("ngrams").version == 1
    os.utime(shard)
    repository.drop_changed()
    with pytest.raises(Unavailable):
        repository.get("ngrams")
