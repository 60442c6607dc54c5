"""Folders of a repository without permission to read, entries that are no model, and too few descriptors."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.core.files import read_file
from preblock.service.runtime.repository import Repository
from tests.support.permissions import limited, ordinary_user, public_folder


@pytest.fixture
def public(tiny_repository: Path) -> Iterator[Path]:
    with public_folder() as place:
        root = shutil.copytree(tiny_repository, place / "repository")
        for folder in (root, *root.rglob("*/")):
            folder.chmod(0o755)
        yield root


def test_unreadable_model_folder_keeps_its_models(public: Path) -> None:
    repository = Repository(public)
    before = repository.get("gpt")
    (public / "gpt").chmod(0)
    shutil.rmtree(public / "bert/1")
    with ordinary_user():
        changes = {(state.name, state.version): state.reason for state in repository.refresh()}
        assert changes == {("bert", 1): "gone", ("gpt", 1): "gpt/1/manifest.json cannot be read: permission denied"}
        assert repository.refresh() == []
        assert repository.get("gpt") is before
        found = find_artifacts(public, [("gpt", 1), ("gpt", 3), ("bert", 3)])
        assert [(name, version) for name, version, _ in found] == [("bert", 2), ("gpt", 1), ("gpt", 3)]
    (public / "gpt").chmod(0o755)
    assert [(state.state, state.reason) for state in repository.refresh()] == [("READY", "")]


def test_unreadable_model_folder_is_logged_once(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    (public / "gpt").chmod(0)
    with ordinary_user():
        for _ in range(2):
            assert {name for name, _, _ in find_artifacts(public)} == {"bert"}
    assert caplog.messages == [f"the model folder '{public}/gpt' cannot be read: permission denied"]


def test_repository_without_permission_is_named(public: Path) -> None:
    public.chmod(0)
    with ordinary_user(), pytest.raises(ArtifactError, match=f"{public} cannot be read: permission denied"):
        find_artifacts(public)


def test_entry_that_is_no_model_is_passed_over(public: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (".tmp-gpt-1/1", "gpt/.tmp-2", "gpt/0", "gpt/02", "gpt/latest", "gpt/2x", "gpt/1/1", "3"):
        (public / name).mkdir(parents=True)
    for name in ("notes.txt", "gpt/2"):
        (public / name).touch()
    (public / "lost+found").mkdir(0)
    for number, target in ((3, "nowhere"), (4, "4")):
        (public / f"gpt/{number}").symlink_to(target)
    with ordinary_user():
        assert [artifact[:2] for artifact in find_artifacts(public)] == [("bert", 1), ("bert", 2), ("gpt", 1)]
    assert caplog.messages == []


def test_lack_of_descriptors_is_no_fault_of_the_folder(tiny_repository: Path) -> None:
    with limited(resource.RLIMIT_NOFILE, 0):
        with pytest.raises(OSError, match="Too many open files"):
            find_artifacts(tiny_repository)
        with pytest.raises(Unavailable, match=r"manifest\.json cannot be read: too many open files"):
            read_file(tiny_repository / "gpt/1/manifest.json", 2**20)


def test_file_that_fails_when_read_is_named() -> None:
    with pytest.raises(ArtifactError, match="mem cannot be read: input/output error"):
        read_file(Path(f"/proc/{os.getpid()}/mem"), 1)
