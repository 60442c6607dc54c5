"""Exports that fail publish nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from preblock.export.errors import ExportError
from preblock.export.exporter import export
from preblock.models.embeddings import BertEmbeddings
from tests.support import commands


def test_export_of_unreadable_source_leaves_no_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"broken: neither model\.safetensors"):
        export(str(broken), "m", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_invalid_name_is_rejected_before_weights_are_read(tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ExportError, match=r"--name: got '\.\./x'"):
        export("gpt2-small", "../x", tmp_path, steps.append)
    assert steps == []


@pytest.mark.parametrize(
    ("weight", "value", "place", "dtype"),
    [
        ("tokens.weight", float("inf"), "row", "float32"),
        ("positions.weight", float("nan"), "row", "float32"),
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
    [  # for the graph, for a part of the table, for one more, for a part of the rounded table
        (2**8, "float32"),
        (2**20, "float32"),
        (2**26 + 1, "float32"),
        (2**20, "int8"),
    ],
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 40}, "resize: got nothing, expected truncate"),
        ({"max_len": 40, "resizing": "truncate"}, "length: got 40, expected 1 to 20"),
        ({"resizing": "truncate"}, "--resize needs --max-len, the new limit of the positions"),
    ],
)
def test_unreachable_max_len_is_rejected(
    tiny_checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        export(str(tiny_checkpoint), "m", tmp_path, **options)
