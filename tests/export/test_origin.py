"""The origin in a manifest: a source that changed since its export, or another export, is not the same."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertModel

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.export.options import resolve
from preblock.export.origin import SameExport, find_same
from preblock.models.frontend_file import INDEX, WEIGHTS
from preblock.service.artifacts.names import MANIFEST
from tests.support.static_models import save_bag


def same(source: Path, repository: Path) -> SameExport | None:
    return find_same(resolve(str(source), "m"), repository, lambda _: None, None)


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with an export of the tiny checkpoint."""
    root = tmp_path_factory.mktemp("exported")
    export(str(tiny_checkpoint), "m", root)
    return root


@pytest.fixture
def source(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def record(repository: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((repository / "m" / "1" / MANIFEST).read_text())["source"]
    return found


def test_manifest_of_folder_names_hashes_of_read_files(exported: Path, tiny_checkpoint: Path) -> None:
    names = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
    hashes = {name: hashlib.sha256((tiny_checkpoint / name).read_bytes()).hexdigest() for name in names}
    assert record(exported)["files"] == hashes
    assert "options" not in record(exported)


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: (folder / WEIGHTS).write_bytes(b"other"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "a new file": lambda folder: (folder / "modules.json").write_text("[]"),
    "settings of the tokenizer": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "a pipe": lambda folder: replace_by_pipe(folder / "config.json"),
}


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_folder_is_not_the_same(change: str, source: Path, exported: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("not read")
    asked = resolve(str(source), "m"), exported, lambda _: None, tmp_path / "cache"
    for _ in range(2):  # without and with the cache
        assert find_same(*asked) == SameExport(1)
    CHANGES[change](source)
    assert find_same(*asked) is None


def test_only_newest_export_of_this_release_is_the_same(source: Path, exported: Path, tmp_path: Path) -> None:
    first = shutil.copytree(exported / "m", tmp_path / "r" / "m") / "1"
    document = json.loads((first / MANIFEST).read_text())
    (first / MANIFEST).write_text(json.dumps(document | {"versions": {"preblock": "0.0.9"}}))
    assert same(source, tmp_path / "r") is None
    shutil.copytree(exported / "m" / "1", first.with_name("2"))
    assert same(source, tmp_path / "r") == SameExport(2)
    for version, options in ((3, {"arithmetic": "source"}), (4, {"max_len": 9, "resizing": "truncate"})):
        made = export(str(source), "m", tmp_path / "r", **options)
        assert (made.folder.name, made.manifest.source.options) == (str(version), options)
        assert made.manifest.source.files == {}
        assert same(source, tmp_path / "r") is None
    (first.with_name("4") / MANIFEST).write_text("{")
    with pytest.raises(ExportError, match=r"m/4: manifest\.json is no JSON file: "):
        same(source, tmp_path / "r")


def test_unread_shard_may_change(source: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(source).save_pretrained(source, max_shard_size="1KB")
    (source / WEIGHTS).unlink()
    export(str(source), "m", tmp_path / "r")
    shards = {file.name for file in source.glob("*.safetensors")}
    read = set(record(tmp_path / "r")["files"])  # type: ignore[call-overload]
    assert INDEX in read
    assert shards & read
    for shard in shards - read:
        (source / shard).unlink()
    assert same(source, tmp_path / "r") == SameExport(1)
    (source / min(shards & read)).write_bytes(b"other")
    assert same(source, tmp_path / "r") is None


def test_static_model_in_subfolder_is_compared(tmp_path: Path) -> None:
    folder = save_bag(tmp_path / "bag")
    export(str(folder), "m", tmp_path / "r")
    assert same(folder, tmp_path / "r") == SameExport(1)
    (weights,) = folder.glob(f"*/{WEIGHTS}")
    weights.write_bytes(b"other")
    assert same(folder, tmp_path / "r") is None
