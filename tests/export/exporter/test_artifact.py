"""Whole exports: their steps, the stored weights, the metadata of graphs, and exports that fail."""

from pathlib import Path

import onnxruntime
import pytest
import torch

from preblock.export.errors import ExportError
from preblock.export.exporter import export, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import BertEmbeddings
from preblock.models.frontend import FrontEnd
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.models.steps import Norm, Project, Tokens
from preblock.service.artifacts.manifest import Manifest, Resized, Source
from tests.models.rejections import rejection
from tests.support import commands


def test_export_reports_every_step(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    export(str(tiny_checkpoint), "m", tmp_path, steps.append)
    assert steps[:3] == [
        f"reading {tiny_checkpoint}",
        "writing the graph",
        "proving it equal",
    ]
    proven = [step.partition(" cases")[0] for step in steps[3:]]  # bytes and rate follow, once it takes a second
    for graph in ("model.onnx", "token.onnx"):
        step = f"proving it equal: {graph}: "
        reported = [text for text in proven if text.startswith(step)]
        assert reported == [f"{step}{done} of {len(reported)}" for done in range(1, len(reported) + 1)]
        assert reported


def test_equal_weights_are_all_stored(tmp_path: Path) -> None:
    steps = (Tokens(rows=30, width=8), Norm(eps=1e-5), Project(width=8), Project(width=8))
    frontend = FrontEnd(FrontEndConfig(family="twins", steps=steps, max_len=20))
    for name in ("norm.bias", "project.bias", "project2.bias"):
        torch.nn.init.zeros_(frontend.get_parameter(name))
    frontend.get_parameter("project2.weight").data = frontend.get_parameter("project.weight").data.clone()
    exported = export_loaded(LoadedSource(frontend.data(), Source(kind="module")), "m", tmp_path)
    assert verify(exported.folder) == exported.parity


def test_resized_max_len_is_recorded_in_manifest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"max_len": 40}, "resize: got nothing, expected truncate"),
        ({"max_len": 40, "resizing": "truncate"}, "length: got 40, expected 1 to 20"),
    ):
        assert message in rejection(ExportError, export, str(tiny_checkpoint), "m", tmp_path, **options)
    exported = export(str(tiny_checkpoint), "m", tmp_path, max_len=26, resizing="interpolate")
    assert isinstance(exported.manifest, Manifest)
    assert exported.manifest.max_len == 26
    assert exported.manifest.resized == Resized(from_max_len=20, method="interpolate")
    assert verify(exported.folder) == exported.parity


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


def test_onnxruntime_metadata_of_stem_holds_sizes(tmp_path: Path) -> None:
    stem = PatchStem(PatchConfig(family="vit", width=4, channels=1, image_size=8, patch_size=4))
    torch.nn.init.zeros_(stem.positions)
    artifact = export_loaded(LoadedSource(stem, Source(kind="module")), "vit", tmp_path)
    found = onnxruntime.InferenceSession(artifact.folder / "model.onnx").get_modelmeta().custom_metadata_map
    assert found == {"preblock.family": "vit", "preblock.image_size": "8", "preblock.patch_size": "4"}
