"""Folders of a repository without permission to read, entries that are no model, and too few descriptors."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.core.files import read_file
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository


@contextmanager
def ordinary_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public(tiny_repository: Path) -> Iterator[Path]:
    """A repository outside pytest's private folders, for another user."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as place:
        root = shutil.copytree(tiny_repository, Path(place) / "repository")
        for folder in (Path(place), root, *root.rglob("*/")):
            folder.chmod(0o755)
        yield root


def test_unreadable_model_folder_keeps_its_models(public: Path) -> None:
    repository = Repository(public, CPU, 1)
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
    (public / "notes.txt").touch()
    (public / "lost+found").mkdir(0)
    (public / "gpt/2").symlink_to("nowhere")
    (public / "gpt/3").symlink_to("3")
    with ordinary_user():
        assert [(name, version) for name, version, _ in find_artifacts(public)] == [
            ("bert", 1),
            ("bert", 2),
            ("gpt", 1),
        ]
    assert caplog.messages == []


def test_lack_of_descriptors_is_no_fault_of_the_folder(tiny_repository: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            find_artifacts(tiny_repository)
        with pytest.raises(Unavailable, match=r"manifest\.json cannot be read: too many open files"):
            read_file(tiny_repository / "gpt/1/manifest.json", 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_file_that_fails_when_read_is_named() -> None:
    with pytest.raises(ArtifactError, match="mem cannot be read: input/output error"):
        read_file(Path(f"/proc/{os.getpid()}/mem"), 1)
