"""A repository to change."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(tiny_repository: Path, tmp_path: Path) -> Path:
    """The tiny repository, to change."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")
