"""The schema of an artifact. Oracles: Python's json and hashlib."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import GRAPH, MANIFEST, PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.errors import ArtifactError
from tests.support.artifacts import copy_artifact


@pytest.fixture
def folder(weighty_repository: Path, tmp_path: Path) -> Path:
    """A copy of an artifact, to break."""
    return shutil.copytree(weighty_repository / "gpt" / "1", tmp_path / "1")


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(("schema", "name"), [(Manifest, MANIFEST), (ParityReport, PARITY)])
def test_record_round_trips_with_same_bytes(folder: Path, schema: Any, name: str) -> None:
    before = (folder / name).read_bytes()
    write(read(schema, folder / name), folder / name)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize(
    ("values", "field", "got"),
    [
        ({"schema_version": 1}, "schema_version", "1"),
        ({"vocab_size": 0}, "vocab_size", "0"),
        ({"dtype": "float64"}, "dtype", "float64"),
        ({"more": 1}, "more", "1"),
        ({"front_end": {"steps": 1}}, "front_end", "{'steps': 1}"),
        ({"front_end": {"steps": [{"kind": []}]}}, "front_end", "{'steps': [{'kind': []}]}"),
        ({"front_end": {"steps": [{"kind": "scale"}]}}, "front_end", "{'steps': [{'kind': 'scale'}]}"),
        ({"graphs": {GRAPH: {"inputs": [{"name": "x"}], "outputs": []}}}, f"graphs.{GRAPH}.inputs.0.dtype", "nothing"),
        ({"files": {"a": {"sha256": "x", "bytes": 1}}}, "files.a.sha256", "x"),
    ],
)
def test_manifest_with_invalid_field_is_rejected(folder: Path, values: Any, field: str, got: str) -> None:
    edit(folder / MANIFEST, **values)
    with pytest.raises(ArtifactError) as refused:
        read(Manifest, folder / MANIFEST)
    assert (refused.value.field, refused.value.got) == (f"{MANIFEST} {field}", got)


@pytest.mark.parametrize(
    ("artifact", "on_cpu", "on_gpu"),
    [("gpt", True, True), ("levels", True, True), ("bert", True, False), ("projected", False, False)],
)
def test_vectors_with_a_norm_depend_on_shape_on_gpu(artifact: str, on_cpu: bool, on_gpu: bool, tmp_path: Path) -> None:
    """A product of matrices depends on the shape of a call everywhere."""
    found = read(Manifest, copy_artifact(artifact, tmp_path) / MANIFEST)
    assert (found.exact_rows, found.exact_rows_on_gpu) == (on_cpu, on_gpu)
