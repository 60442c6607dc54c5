"""Conversions, interrupted or killed."""

import signal
from pathlib import Path

import pytest

from preblock.export.exporter import export
from preblock.export.layouts import conversion
from preblock.export.layouts.conversion import convert
from preblock.export.publication import DRAFT
from tests.export.interruption import end_at, interrupt_at
from tests.support.artifacts import copy_artifact
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def large_artifact(large_checkpoint: Path, shared: Shared) -> Path:
    """The folder of an artifact with a table of 80 MB."""
    return shared.build("large export", lambda root: export(str(large_checkpoint), "m", root).folder)


def end_conversion(artifact: Path, output: Path, number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a conversion that writes its table; return its exit code and standard error."""
    options = ("--layout", "openvino", "--output", output, "--repository", artifact.parent.parent)
    return end_at(number, output, f"{DRAFT}*/*.bin", "convert", "m", *options)


def test_draft_of_killed_conversion_is_removed_by_next(large_artifact: Path, tmp_path: Path) -> None:
    code, _ = end_conversion(large_artifact, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert [path.name.startswith(DRAFT) for path in tmp_path.iterdir()] == [True]
    assert sorted(convert(large_artifact, "openvino", tmp_path)) == sorted(tmp_path.iterdir())


def test_conversion_interrupted_at_any_line_leaves_all_files_or_none(tmp_path: Path) -> None:
    artifact = copy_artifact("gpt", tmp_path)
    found = set[int]()

    def run() -> None:
        convert(artifact, "openvino", output)

    for line in range(100):
        output = tmp_path / str(line)
        stopped = interrupt_at(line, conversion.__file__, run)
        found.add(sum(path.is_file() for path in output.glob("**/*")))
        if not stopped:
            break
    assert line > 20
    assert found == {0, 2}
