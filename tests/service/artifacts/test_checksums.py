"""The cache of checksums; a broken cache only costs time. Oracle: hashlib."""

import hashlib
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

import pytest

from preblock.service.artifacts import checksums, io
from preblock.service.artifacts.checksums import CACHE_FILE, Checksums
from preblock.service.artifacts.names import DATA, MANIFEST
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
def test_hash_cache_key_is_file_stat(folder: Path, file: Path) -> None:
    known = Checksums(folder)
    assert ask(known, file) == sum_of(b"content")
    known.save()
    assert json.loads((folder / CACHE_FILE).read_text()) == {key_of(file): sum_of(b"content")}
    assert (folder.stat().st_mode & 0o777, (folder / CACHE_FILE).stat().st_mode & 0o777) == (0o700, 0o600)
    assert list(folder.iterdir()) == [folder / CACHE_FILE]


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
def test_file_changed_during_hashing_is_not_cached(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Checksums(folder)

    def sha256(_: BufferedReader) -> str:
        file.write_bytes(b"longer content")
        return FALSE

    monkeypatch.setattr(io, "sha256", sha256)
    assert ask(known, file) == FALSE
    monkeypatch.setattr(io, "sha256", lambda _: "hashed again")
    assert ask(known, file) == "hashed again"


@pytest.mark.usefixtures("later")
def test_cache_without_folder_writes_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    known = Checksums(None)
    assert ask(known, file) == sum_of(b"content")
    known.save()
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "[" * 10**5, '{"a": 1}', '{"1:2": "x"}', f'{{"x": "{FALSE}"}}', "9" * 5000, " " * 2**21],
    ids=range(10),
)
def test_malformed_cache_file_is_replaced(folder: Path, file: Path, content: str) -> None:
    plant(folder, content)
    known = Checksums(folder)
    assert ask(known, file) == sum_of(b"content")
    known.save()
    assert json.loads((folder / CACHE_FILE).read_text()) == {key_of(file): sum_of(b"content")}


@pytest.mark.usefixtures("later")
def test_cache_file_writable_by_others_is_ignored(folder: Path, file: Path) -> None:
    plant(folder, json.dumps({key_of(file): FALSE}))
    assert ask(Checksums(folder), file) == FALSE
    for mode in (0o620, 0o602):
        (folder / CACHE_FILE).chmod(mode)
        assert ask(Checksums(folder), file) == sum_of(b"content")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_cache_file_of_another_user_is_ignored(folder: Path, file: Path) -> None:
    plant(folder, json.dumps({key_of(file): FALSE}))
    os.chown(folder / CACHE_FILE, 12345, 12345)
    assert ask(Checksums(folder), file) == sum_of(b"content")


def test_symlinked_cache_file_is_ignored(folder: Path, file: Path, tmp_path: Path) -> None:
    plant(folder, json.dumps({key_of(file): FALSE}))
    (folder / CACHE_FILE).rename(tmp_path / "elsewhere")
    (folder / CACHE_FILE).symlink_to(tmp_path / "elsewhere")
    assert ask(Checksums(folder), file) == sum_of(b"content")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere", "/dev/null", "~no-such-user/cache"])
def test_files_are_hashed_each_time_if_cache_is_unwritable(file: Path, tmp_path: Path, place: str) -> None:
    for _ in range(2):
        known = Checksums(Path(place) if place.startswith("~") else tmp_path / place)
        assert ask(known, file) == sum_of(b"content")
        known.save()
    assert file.read_bytes() == b"content"


@pytest.mark.usefixtures("later")
def test_folder_in_place_of_cache_file_is_kept(folder: Path, file: Path) -> None:
    (folder / CACHE_FILE / "kept").mkdir(parents=True)
    known = Checksums(folder)
    assert ask(known, file) == sum_of(b"content")
    known.save()
    assert [path.name for path in folder.iterdir()] == [CACHE_FILE]


@pytest.mark.usefixtures("later")
def test_cache_path_expands_home_folder(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    known = Checksums(Path("~/.cache/preblock"))
    ask(known, file)
    known.save()
    assert (tmp_path / ".cache/preblock" / CACHE_FILE).is_file()


@pytest.mark.usefixtures("later")
def test_cache_keeps_the_most_recently_used_hashes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "MAX_FILES", 3)
    files = [tmp_path / str(number) for number in range(5)]
    for file in files:
        file.write_text(file.name)
        known = Checksums(folder)
        ask(known, files[0])
        ask(known, file)
        known.save()
        assert key_of(files[0]) in json.loads((folder / CACHE_FILE).read_text())
    assert set(json.loads((folder / CACHE_FILE).read_text())) == {key_of(files[number]) for number in (0, 3, 4)}


@pytest.mark.usefixtures("later")
def test_concurrent_saves_leave_valid_cache_file(folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(40)]
    for file in files:
        file.write_text(file.name)

    def check(file: Path) -> None:
        known = Checksums(folder)
        assert ask(known, file) == sum_of(file.name.encode())
        known.save()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, files))
    found = json.loads((folder / CACHE_FILE).read_text())
    assert found.items() <= {key_of(file): sum_of(file.name.encode()) for file in files}.items()
    assert found
    assert list(folder.iterdir()) == [folder / CACHE_FILE]


@pytest.mark.usefixtures("later")
def test_repository_files_are_hashed_once(
    weighty_repository: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(weighty_repository, tmp_path / "root")
    hashed: list[int] = []

    def sha256(stream: BufferedReader) -> str:
        hashed.append(os.fstat(stream.fileno()).st_size)
        return sum_of(stream.read())

    monkeypatch.setattr(io, "sha256", sha256)
    files = json.loads((root / "gpt/1" / MANIFEST).read_text())["files"]
    Repository(root, cache=folder)
    assert sorted(hashed) == sorted(file["bytes"] for file in files.values())
    Repository(root, cache=folder)
    assert len(hashed) == len(files)
    data = root / "gpt/1" / DATA
    data.write_bytes(data.read_bytes())
    Repository(root, cache=folder)
    assert hashed[len(files) :] == [data.stat().st_size]


def test_check_uses_the_cache_and_verify_ignores_it(tmp_path: Path) -> None:
    file = copy_artifact("gpt", tmp_path / "models") / DATA  # verify writes the report
    plant(tmp_path / "cache", json.dumps({key_of(file): FALSE}))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        arguments += ("--repository", str(tmp_path / "models"))
        return commands.run(commands.preblock, *arguments, environment={"PREBLOCK_CACHE_DIR": str(tmp_path / "cache")})

    refused, verified = run("check"), run("verify", "gpt")
    assert refused.stderr.startswith(f"preblock: gpt/1/{DATA}: got sha256 {FALSE[:12]}…")
    assert verified.returncode == 0, verified.stderr
