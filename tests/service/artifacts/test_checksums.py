"""The cache of checksums; a broken cache only costs time. Oracle: hashlib."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

import pytest

from preblock.service.artifacts.checksums import CACHE_FILE, MAX_FILES, Checksums
from preblock.service.artifacts.names import DATA, MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import open_file, signature_of
from preblock.service.runtime.repository import Repository
from tests.support import commands
from tests.support.artifacts import copy_artifact

FALSE = "f" * 64


def sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def ask(known: Checksums, file: Path) -> str:
    with open_file(file) as stream:
        return known.sha256(stream)


def key_of(file: Path) -> str:
    return ":".join(map(str, signature_of(file.stat())))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"content")
    return tmp_path / "file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "cache"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all files old enough for the cache."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**10)


def plant(folder: Path, content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CACHE_FILE).write_text(content)
    (folder / CACHE_FILE).chmod(0o600)


@pytest.mark.usefixtures("later")
def test_change_with_same_size_and_mtime_is_detected(folder: Path, file: Path) -> None:
    known = Checksums(folder)
    ask(known, file)
    before = file.stat()
    time.sleep(0.02)  # ticks of a coarse clock
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert ask(known, file) == sum_of(b"CONTENT")


def test_recently_changed_file_is_not_cached(folder: Path, file: Path) -> None:
    known = Checksums(folder)
    assert ask(known, file) == sum_of(b"content")
    known.save()
    assert not folder.exists()


@pytest.mark.usefixtures("later")
def test_file_changed_during_hashing_is_not_cached(folder: Path, file: Path) -> None:
    known = Checksums(folder)

    def change(_: BufferedReader) -> str:
        file.write_bytes(b"longer content")
        return FALSE

    with open_file(file) as stream:
        assert known.sha256(stream, change) == FALSE
    assert ask(known, file) == sum_of(b"longer content")


@pytest.mark.usefixtures("later")
def test_malformed_cache_file_is_replaced(folder: Path, file: Path) -> None:
    for content in (
        *("", "{", "[]", "null", "[" * 10**5, '{"a": 1}', '{"1:2": "x"}', f'{{"x": "{FALSE}"}}'),
        *("9" * 5000, " " * 2**21),
    ):
        plant(folder, content)
        known = Checksums(folder)
        assert ask(known, file) == sum_of(b"content")
        known.save()
        assert json.loads((folder / CACHE_FILE).read_text()) == {key_of(file): sum_of(b"content")}, content[:20]


def link_elsewhere(cache: Path) -> None:
    cache.rename(cache.parent.parent / "elsewhere")
    cache.symlink_to(cache.parent.parent / "elsewhere")


@pytest.mark.usefixtures("later")
def test_cache_file_that_others_may_change_is_ignored(folder: Path, file: Path) -> None:
    plant(folder, json.dumps({key_of(file): FALSE}))
    assert ask(Checksums(folder), file) == FALSE
    changes: list[Callable[[Path], object]] = [
        lambda cache: cache.chmod(0o620),
        lambda cache: cache.chmod(0o602),
        link_elsewhere,
        *([lambda cache: os.chown(cache, 12345, 12345)] if os.geteuid() == 0 else []),
    ]
    for number, change in enumerate(changes):
        plant(folder, json.dumps({key_of(file): FALSE}))
        change(folder / CACHE_FILE)
        assert ask(Checksums(folder), file) == sum_of(b"content"), number
        (folder / CACHE_FILE).unlink()


@pytest.mark.usefixtures("later")
def test_files_are_hashed_each_time_without_a_cache(file: Path, tmp_path: Path) -> None:
    (tmp_path / "folder" / CACHE_FILE / "kept").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    places = [tmp_path / name for name in ("file", "file/below", "folder", "/proc/nowhere", "/dev/null")]
    for place in (None, Path("~no-such-user/cache"), *places):
        for _ in range(2):
            known = Checksums(place)
            assert ask(known, file) == sum_of(b"content"), place
            known.save()
    assert file.read_bytes() == b"content"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("later")
def test_cache_path_expands_home_folder(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    known = Checksums(Path("~/.cache/preblock"))
    ask(known, file)
    known.save()
    assert (tmp_path / ".cache/preblock" / CACHE_FILE).is_file()


@pytest.mark.usefixtures("later")
def test_cache_keeps_the_most_recently_used_hashes(folder: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    others = {f"{number}:1": FALSE for number in range(1, MAX_FILES)}
    plant(folder, json.dumps({key_of(file): sum_of(b"content"), **others}))
    known = Checksums(folder)
    assert ask(known, file) == sum_of(b"content")
    assert ask(known, tmp_path / "other") == sum_of(b"other")
    known.save()
    kept = [*list(others)[1:], key_of(file), key_of(tmp_path / "other")]
    assert list(json.loads((folder / CACHE_FILE).read_text())) == kept


@pytest.mark.usefixtures("later")
def test_concurrent_saves_leave_valid_cache_file(folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    for file in files:
        file.write_text(file.name)
    sums = {key_of(file): sum_of(file.name.encode()) for file in files}

    def check(file: Path) -> None:
        known = Checksums(folder)
        assert ask(known, file) == sums[key_of(file)]
        known.save()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, files))
    found = json.loads((folder / CACHE_FILE).read_text())
    assert found
    assert found.items() <= sums.items()
    assert list(folder.iterdir()) == [folder / CACHE_FILE]


@pytest.mark.usefixtures("later")
def test_repository_files_are_hashed_once(weighty_repository: Path, folder: Path) -> None:
    artifact = weighty_repository / "gpt/1"
    files = json.loads((artifact / MANIFEST).read_text())["files"]
    Repository(weighty_repository, cache=folder)
    known = {key_of(artifact / name): described["sha256"] for name, described in files.items()}
    assert json.loads((folder / CACHE_FILE).read_text()) == known
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / CACHE_FILE)] == [0o700, 0o600]
    plant(folder, json.dumps(known | {key_of(artifact / DATA): FALSE}))
    with pytest.raises(ArtifactError, match=f"^gpt/1/{DATA}: got sha256 {FALSE[:12]}…"):
        Repository(weighty_repository, cache=folder)


def test_verify_ignores_the_cache(tmp_path: Path) -> None:
    file = copy_artifact("gpt", tmp_path / "models") / DATA  # verify writes the report
    plant(tmp_path / "cache", json.dumps({key_of(file): FALSE}))
    places = {"PREBLOCK_CACHE_DIR": str(tmp_path / "cache"), "PREBLOCK_REPOSITORY": str(tmp_path / "models")}
    verified = commands.run(commands.preblock, "verify", "gpt", environment=places)
    assert verified.returncode == 0, verified.stderr
