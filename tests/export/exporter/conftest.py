"""The export of a tiny checkpoint, and a copy to change."""

import shutil
from pathlib import Path

import pytest

from preblock.export.exporter import ExportResult, export


@pytest.fixture(scope="module")
def tiny_export(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(str(tiny_checkpoint), "tiny", tmp_path_factory.mktemp("repository"))


@pytest.fixture
def tiny_copy(tiny_export: ExportResult, tmp_path: Path) -> Path:
    """The tiny artifact, to break."""
    return shutil.copytree(tiny_export.folder, tmp_path / "1")
