"""Removals without permission; configurations and records on a full disk."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from preblock.export.errors import ExportError
from preblock.export.layouts.triton import write_config
from preblock.export.verification import verify
from preblock.export.withdrawal import withdraw
from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.names import PARITY
from preblock.service.artifacts.parity import ParityReport
from preblock.service.runtime.providers import CPU
from tests.support.artifacts import make_repository
from tests.support.permissions import limited, ordinary_user, public_folder


@pytest.fixture
def version() -> Iterator[Path]:
    with public_folder() as place:
        folder = make_repository(place, gpt="gpt") / "gpt/1"
        for made in (folder, folder.parent):
            made.chmod(0o755)
        yield folder


def test_version_of_another_user_stays(version: Path) -> None:
    before = sorted(version.parent.rglob("*"))
    with ordinary_user(), pytest.raises(ExportError, match=f"^{version}: Permission denied$"):
        withdraw([version])
    assert sorted(version.parent.rglob("*")) == before
    withdraw([version])
    assert not version.parent.exists()


def test_config_on_a_full_disk_is_not_written(version: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 0), pytest.raises(ExportError, match=r"config\.pbtxt: File too large$"):
        write_config(version.parent)
    assert [entry.name for entry in version.parent.iterdir()] == ["1"]


def test_proof_on_a_full_disk_is_not_recorded(version: Path) -> None:
    recorded = read(ParityReport, version / PARITY)
    old = {CPU: recorded.providers[CPU].model_copy(update={"reference": "torch 0.1"})}
    write(recorded.model_copy(update={"providers": old}), version / PARITY)
    before = (version / PARITY).read_bytes()
    with (
        limited(resource.RLIMIT_FSIZE, 0),
        pytest.raises(ExportError, match=r"parity\.json: proven, but not recorded: File too large$"),
    ):
        verify(version)
    assert (version / PARITY).read_bytes() == before
