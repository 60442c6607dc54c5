"""Folders of a repository without permission to read."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from preblock.service.artifacts.catalog import find_artifacts
from preblock.service.core.errors import ArtifactError
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
