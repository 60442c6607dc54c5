"""The schema of an artifact. Oracles: Python's json and hashlib."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from preblock.service.artifacts.io import check_files, describe, read, write
from preblock.service.artifacts.manifest import File, Manifest
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, PARITY
from preblock.service.artifacts.parity import OutputParity, Parity, ParityReport
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
    ("values", "message"),
    [
        ({"schema_version": 2}, "manifest.json schema_version: got 2, expected 1"),
        ({"vocab_size": 0}, "manifest.json vocab_size: got 0, expected more than 0"),
        ({"max_len": -1}, "manifest.json max_len: got -1, expected"),
        ({"indices": {"langs": 0}}, "manifest.json indices.langs: got 0, expected"),
        ({"width": "x"}, "manifest.json width: got x, expected"),
        ({"dtype": "float64"}, "manifest.json dtype: got float64, expected"),
        ({"more": 1}, "manifest.json more: got 1, expected no such field"),
        (
            {"graphs": {"model.onnx": {"inputs": [{"name": "x"}], "outputs": []}}},
            "manifest.json graphs.model.onnx.inputs.0.dtype: got nothing, expected a value",
        ),
        ({"files": {"a": {"sha256": "x", "bytes": 1}}}, "manifest.json files.a.sha256: got x, expected"),
        ({"source": {"kind": "web"}}, "manifest.json source.kind: got web, expected"),
    ],
)
def test_manifest_with_invalid_field_is_rejected(folder: Path, values: Any, message: str) -> None:
    edit(folder / MANIFEST, **values)
    with pytest.raises(ArtifactError) as refused:
        read(Manifest, folder / MANIFEST)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
def test_parity_file_without_json_object_is_rejected(folder: Path, content: bytes) -> None:
    (folder / PARITY).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"^parity\.json: got "):
        read(ParityReport, folder / PARITY)


def test_missing_manifest_is_rejected(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match=r"^manifest\.json cannot be read: no such file or directory$"):
        read(Manifest, folder / MANIFEST)


def test_records_are_frozen(folder: Path) -> None:
    manifest: Any = read(Manifest, folder / MANIFEST)
    with pytest.raises(ValidationError):
        manifest.vocab_size = 1


def test_describe_returns_size_and_sha256(folder: Path) -> None:
    content = (folder / DATA).read_bytes()
    assert describe(folder / DATA) == File(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def test_unchanged_artifact_passes_hash_check(folder: Path) -> None:
    check_files(folder, read(Manifest, folder / MANIFEST))


@pytest.mark.parametrize("name", [GRAPH, DATA])
def test_changed_file_is_rejected(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError) as refused:
        check_files(folder, read(Manifest, folder / MANIFEST))
    assert refused.value.field == name
    assert refused.value.got == f"sha256 {hashlib.sha256(content).hexdigest()[:12]}…, {len(content)} bytes"


@pytest.mark.parametrize("name", [GRAPH, DATA])
def test_missing_file_is_rejected(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=f"^{name} is missing$"):
        check_files(folder, read(Manifest, folder / MANIFEST))


@pytest.mark.parametrize(
    ("max_abs", "max_ulp", "summary"),
    [(0.0, 0.0, "0 cases bit for bit equal"), (1.2e-7, 1.5, "0 cases within 1.2e-07 (1.5 ULP)")],
)
def test_parity_summary_states_largest_difference(max_abs: float, max_ulp: float, summary: str) -> None:
    parity = OutputParity(allowed_ulp=2, max_abs=max_abs, max_ulp=max_ulp, cases=())
    assert parity.summary() == summary
    outputs = {"embeddings": parity, "bias": parity}
    assert Parity(onnxruntime="1", torch="2", outputs=outputs).summary() == f"embeddings: {summary}; bias: {summary}"


@pytest.mark.parametrize(
    ("artifact", "on_cpu", "on_gpu"),
    [("gpt", True, True), ("levels", True, True), ("bert", True, False), ("projected", False, False)],
)
def test_vectors_with_a_norm_depend_on_shape_on_gpu(artifact: str, on_cpu: bool, on_gpu: bool, tmp_path: Path) -> None:
    """A product of matrices depends on the shape of a call everywhere."""
    found = read(Manifest, copy_artifact(artifact, tmp_path) / MANIFEST)
    assert (found.exact_rows, found.exact_rows_on_gpu) == (on_cpu, on_gpu)
