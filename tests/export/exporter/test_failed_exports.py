"""Exports that fail publish nothing."""

from pathlib import Path

import pytest
import torch

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.models.embeddings import BertEmbeddings
from tests.support import commands


@pytest.mark.parametrize(
    ("weight", "value", "place", "dtype"),
    [
        ("tokens.weight", float("inf"), "row", "float32"),
        ("norm.bias", float("nan"), "element", "float32"),
        ("norm.bias", float("nan"), "element", "int8"),
    ],
)
def test_weight_that_is_not_finite_is_named(weight: str, value: float, place: str, dtype: str, tmp_path: Path) -> None:
    frontend = BertEmbeddings(7, 4, 6)
    with torch.no_grad():
        frontend.get_parameter(weight)[3] = value
    frontend.save_frontend(tmp_path / "trained")
    with pytest.raises(
        ExportError, match=rf"differ.*; {weight}: got NaN or infinity in {place} 3, expected finite numbers$"
    ):
        export(str(tmp_path / "trained"), "m", tmp_path / "models", dtype=dtype)
    assert not (tmp_path / "models" / "m").exists()


@pytest.mark.parametrize(
    ("room", "dtype"),
    [(2**8, "float32"), (2**26 + 1, "float32"), (2**20, "int8")],  # for the graph, for parts of the tables
)
def test_export_on_full_disk_fails_and_leaves_no_files(
    large_checkpoint: Path, tmp_path: Path, room: int, dtype: str
) -> None:
    arguments = ("export", large_checkpoint, "--name", "m", "--repository", tmp_path, "--dtype", dtype)
    done = commands.run(commands.preblock, *arguments, room=room)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"preblock: {tmp_path}: File too large"
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
