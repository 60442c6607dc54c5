"""The export of a tiny checkpoint, and a copy to change."""

import shutil
from pathlib import Path

import pytest

from preblock.export.exporter import ExportResult, export
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def tiny_export(tiny_checkpoint: Path, shared: Shared) -> ExportResult:
    return shared.build("tiny export", lambda root: export(str(tiny_checkpoint), "tiny", root))


@pytest.fixture
def tiny_copy(tiny_export: ExportResult, tmp_path: Path) -> Path:
    """The tiny artifact, to break."""
    return shutil.copytree(tiny_export.folder, tmp_path / "1")
