"""Artifacts with tables in a file outside, which may change and return. Oracles: the file system, safetensors."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.names import MANIFEST
from preblock.service.core.errors import ArtifactError, NotFound, Unavailable
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.model import ServedModel
from preblock.service.runtime.repository import Repository
from tests.service.artifacts.broken_artifacts import change_part, change_table
from tests.support.artifacts import copy_artifact
from tests.support.references import SHARD, edit_manifest, make_referenced, open_repository, refer

Record = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact of the model `ngrams`."""
    return make_referenced(tmp_path / "repository", tmp_path / "checkpoint")


@pytest.fixture
def shard(folder: Path) -> Path:
    """The file with its tables."""
    return folder.parents[2] / "checkpoint" / SHARD


def refusal(folder: Path, *roots: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        open_repository(folder, *roots)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix("ngrams/1/")


def rewrite(shard: Path, change: Callable[[bytearray], object]) -> None:
    """Change the content of the file, and keep its time."""
    status, content = shard.stat(), bytearray(shard.read_bytes())
    change(content)
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_referenced_tables_are_opened_below_a_root(folder: Path, shard: Path, tmp_path: Path) -> None:
    for root in (shard.parent, tmp_path, Path("/")):
        manifest = open_repository(folder, tmp_path / "other", root).get("ngrams").manifest
        for layer, (table, tensor) in enumerate(zip(manifest.ngram_tables, load_file(shard).values(), strict=True)):
            (part,) = table.parts
            found = np.fromfile(part.file, np.float32, table.rows * table.width, offset=part.begin)
            assert np.array_equal(found.reshape(-1, table.width), tensor), layer


def test_linked_folder_in_a_root_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    refer(folder, tmp_path / "link/checkpoint" / SHARD)
    assert open_repository(folder, tmp_path / "link").get("ngrams").version == 1


@pytest.mark.parametrize("roots", [(), ("other",), ("check",), ("checkpoint/model.safetensors.d",)])
def test_file_outside_the_roots_is_rejected(roots: tuple[str, ...], folder: Path, shard: Path, tmp_path: Path) -> None:
    allowed = [tmp_path / root for root in roots]
    text = ", ".join(map(str, allowed)) or "no folder"
    expected = f"references {shard} is outside the folders of the setting reference_roots: {text}"
    assert refusal(folder, *allowed) == expected


def test_link_out_of_the_roots_is_rejected(folder: Path, shard: Path, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    link = tmp_path / "root" / SHARD
    link.symlink_to(shard)
    refer(folder, link)
    expected = f"references {link}, a link to {shard}, is outside the folders of the setting reference_roots: "
    assert refusal(folder, link.parent).startswith(expected)


def _rename(path: str) -> Callable[[Record], None]:
    def change(manifest: Record) -> None:
        (old,) = manifest["references"]
        manifest["references"] = {path: manifest["references"][old]}

    return change


def test_path_that_is_not_absolute_is_rejected(folder: Path) -> None:
    for path in ("model.safetensors", "../../checkpoint/model.safetensors", "/tmp/../etc/passwd", "/a\0b", ""):
        edit_manifest(folder, _rename(path))
        assert refusal(folder, Path("/")) == f"references {path}: got {path}, expected an absolute path without '..'"


def test_path_that_the_system_rejects_leaves_other_models(folder: Path) -> None:
    copy_artifact("gpt", folder.parents[1])
    repository = open_repository(folder, Path("/"))
    edit_manifest(folder, _rename("/" + "a" * 300))
    repository.refresh()
    assert repository.get("gpt").version == 1
    (reason,) = (state.reason for state in repository.states() if state.reason)
    assert reason.endswith("got file name too long, expected a readable file")


def test_missing_or_special_file_is_rejected(folder: Path, shard: Path, tmp_path: Path) -> None:
    shard.unlink()
    assert refusal(folder, tmp_path) == f"references {shard} is missing; moved files need another export"
    for make in (os.mkfifo, os.mkdir):
        shard.unlink(missing_ok=True)
        make(shard)
        assert refusal(folder, tmp_path) == f"references {shard}: got a folder or device, expected a regular file"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop(), r" size: got \d+, expected \d+, as at the export"),
        (lambda content: content.__setitem__(20, 0x41), r" header: got sha256 \w{12}…, expected sha256 \w{12}…, as at"),
        (lambda content: content.__setitem__(7, 1), r": got a header of \d+ bytes in \d+, expected a safetensors file"),
        (
            lambda content: content.__setitem__(8, 0x41),
            r": got an invalid header \(a header that is no JSON object\), expected",
        ),
    ],
)
def test_changed_file_is_rejected(
    change: Callable[[bytearray], object], message: str, folder: Path, shard: Path
) -> None:
    rewrite(shard, change)
    with pytest.raises(ArtifactError, match=rf"^ngrams/1/references {shard}{message}"):
        open_repository(folder, shard.parent)


def test_file_shorter_than_its_tensors_is_rejected(folder: Path, shard: Path) -> None:
    rewrite(shard, bytearray.pop)
    found = {"bytes": shard.stat().st_size, "mtime_ns": shard.stat().st_mtime_ns}
    edit_manifest(folder, lambda manifest: manifest["references"][str(shard)].update(found))
    assert refusal(folder, shard.parent).endswith(" bytes of header and consecutive tensors")


SCALES = {"file": "model.onnx.data", "begin": 0, "dtype": "float32", "block_rows": 240, "block_columns": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_table(dtype="float16"), r"\.parts\.0: got float16 \[240, 16\] from byte \d+, expected a tensor of /"),
        (change_table(rows=241), r"\.parts: got 240, expected 241 rows"),
        (change_part(begin=10**9), r"\.parts\.0: got float32 \[240, 16\] from byte 1000000000, expected a tensor of"),
        (change_part(file="model.onnx.data"), r"\.parts\.0\.file: got model.onnx.data, expected a file of references"),
        (change_part(file="/etc/passwd"), r"\.parts\.0\.file: got /etc/passwd, expected a file of references"),
        (
            change_part(scales=SCALES),
            r"\.parts\.0\.scales: got .*, expected scales for float8_e4m3fn, and for no other",
        ),
    ],
)
def test_table_that_is_no_tensor_of_the_file_is_rejected(
    change: Callable[[list[Record]], None], message: str, folder: Path, shard: Path
) -> None:
    edit_manifest(folder, lambda manifest: change(manifest["ngram_tables"]))
    with pytest.raises(ArtifactError, match=rf"^ngrams/1/manifest\.json ngram_tables\.0{message}"):
        open_repository(folder, shard.parent)


def test_tensor_with_more_bytes_than_its_shape_is_rejected(folder: Path, shard: Path) -> None:
    shard.write_bytes(shard.read_bytes().replace(b"[240,16]", b"[240, 8]", 1))
    refer(folder, shard)
    edit_manifest(folder, lambda manifest: manifest["ngram_tables"][0].update(width=8))
    assert refusal(folder, shard.parent).startswith(f"{MANIFEST} ngram_tables.0.parts.0: got float32 [240, 8] from")


def test_wrong_record_of_a_file_is_rejected(folder: Path, shard: Path) -> None:
    before = json.loads((folder / MANIFEST).read_text())
    (record,) = before["references"].values()
    for references, message in (
        ({}, "ngram_tables.0.parts: got "),
        ({str(shard): record | {"sha256": "x"}}, "references."),
        ({str(shard): {"bytes": 1, "mtime_ns": 1, "sha256": None}}, f"references.{shard}.header_sha256: got nothing"),
    ):
        (folder / MANIFEST).write_text(json.dumps(before | {"references": references}))
        assert refusal(folder, shard.parent).startswith(f"{MANIFEST} {message}")


@pytest.mark.parametrize("shape", [(), (240,), (240, 1), (2, 1)])
def test_scales_of_float8_are_located(shape: tuple[int, ...], folder: Path, shard: Path) -> None:
    tensors: dict[str, Any] = load_file(shard)
    blocks = {2: (128, 128), 240: (1, 16)}.get(shape[0] if shape else 1, (240, 16))
    for layer in range(2):
        tensors[f"layers.{layer}.weight"] = tensors[f"layers.{layer}.weight"].astype(ml_dtypes.float8_e4m3fn)
    tensors["scale"] = np.ones(shape, np.float32)
    save_file(tensors, shard)
    refer(folder, shard)
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    begin = 8 + length + json.loads(content[8 : 8 + length])["scale"]["data_offsets"][0]
    scales = {"file": str(shard), "begin": begin, "dtype": "float32", "block_rows": blocks[0]}

    def change(manifest: Record) -> None:
        del manifest["ngram_tables"][1:]
        manifest["ngram_tables"][0]["dtype"] = "float8_e4m3fn"
        manifest["ngram_tables"][0]["parts"][0]["scales"] = scales | {"block_columns": blocks[1]}
        manifest["graphs"]["ngram.ids.onnx"]["outputs"][0]["shape"][2] = 1

    edit_manifest(folder, change)
    # The graph still has two layers: its check comes after that of the scales.
    assert "graphs.ngram.ids.onnx.outputs" in refusal(folder, shard.parent)
    edit_manifest(folder, lambda m: m["ngram_tables"][0]["parts"][0]["scales"].update(block_rows=7))
    assert refusal(folder, shard.parent).startswith("manifest.json ngram_tables.0.parts.0.scales: got float32 [")


def test_version_with_changed_file_is_dropped_once(folder: Path, shard: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = open_repository(folder, shard.parent)
    calls: list[int] = []
    repository.listeners.append(lambda: calls.append(1))
    repository.drop_changed()
    assert repository.get("ngrams").version == 1
    assert not calls
    os.utime(shard)
    repository.drop_changed()
    for version, error in ((None, Unavailable), ("1", Unavailable), ("2", NotFound)):
        with pytest.raises(error):
            repository.find("ngrams", version)
    assert len(calls) == 1
    assert f"model ngrams version 1 is out of service: ngrams/1/references {shard}: got a change" in caplog.text
    (state,) = repository.refresh()
    assert (state.state, "time of change" in state.reason) == ("UNAVAILABLE", True)


@dataclass(frozen=True, kw_only=True)
class HeldLoader(ModelLoader):
    """Opens `slow` when it may."""

    begun: Event = field(default_factory=Event)
    may: Event = field(default_factory=Event)

    def load(self, name: str, version: int, folder: Path, checksums: Checksums) -> ServedModel:
        if name == "slow":
            self.begun.set()
            assert self.may.wait(60)
        return super().load(name, version, folder, checksums)


def test_version_with_changed_file_stops_during_a_refresh(folder: Path, shard: Path) -> None:
    loader = HeldLoader(reference_roots=(shard.parent,))
    repository = Repository(folder.parents[1], loader)
    copy_artifact("gpt", folder.parents[1], "slow")
    with ThreadPoolExecutor() as threads:
        refreshed = threads.submit(repository.refresh)
        try:
            assert loader.begun.wait(60)
            os.utime(shard)
            threads.submit(repository.drop_changed).result(10)
            with pytest.raises(Unavailable):
                repository.get("ngrams")
        finally:
            loader.may.set()
        refreshed.result(60)
    assert repository.get("slow").version == 1
    with pytest.raises(Unavailable):
        repository.get("ngrams")


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
    (folder / MANIFEST).write_text("{")
    repository.refresh()
    repository.drop_changed()
    assert repository.get("ngrams").version == 1
    os.utime(shard)
    repository.drop_changed()
    with pytest.raises(Unavailable):
        repository.get("ngrams")
