"""Copies of artifacts to break."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def weighty_copy(weighty_repository: Path, tmp_path: Path) -> Path:
    """A copy of an artifact with a data file, to break."""
    return shutil.copytree(weighty_repository, tmp_path / "root") / "gpt" / "1"
