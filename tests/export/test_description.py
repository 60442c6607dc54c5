"""The metadata of a graph."""

from pathlib import Path

import onnxruntime
import pytest
import torch

from preblock.export.exporter import ExportResult, export, export_loaded
from preblock.export.source import LoadedSource
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.service.artifacts.manifest import Source
from tests.families.bias_models import save
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def exported(tiny_checkpoint: Path, shared: Shared) -> list[ExportResult]:
    """A BERT with segments and a T5 with a bias."""

    def fill(root: Path) -> list[ExportResult]:
        save("t5/decoder", root / "t5")
        return [export(str(tiny_checkpoint), "bert", root), export(str(root / "t5"), "t5", root, side="decoder")]

    return shared.build("described", fill)


def test_onnxruntime_metadata_holds_limits(exported: list[ExportResult]) -> None:
    bert, t5 = (onnxruntime.InferenceSession(artifact.folder / "model.onnx").get_modelmeta() for artifact in exported)
    assert bert.custom_metadata_map == {
        "preblock.family": "bert",
        "preblock.vocab_size": "40",
        "preblock.max_len": "20",
        "preblock.indices.token_type_ids": "2",
    }
    assert t5.custom_metadata_map == {"preblock.family": "t5/decoder", "preblock.vocab_size": "50"}
    assert (bert.producer_name, bert.graph_name) == ("preblock", "model")


def test_onnxruntime_metadata_of_stem_holds_sizes(tmp_path: Path) -> None:
    stem = PatchStem(PatchConfig(family="vit", width=4, channels=1, image_size=8, patch_size=4))
    torch.nn.init.zeros_(stem.positions)
    artifact = export_loaded(LoadedSource(stem, Source(kind="module")), "vit", tmp_path)
    found = onnxruntime.InferenceSession(artifact.folder / "model.onnx").get_modelmeta().custom_metadata_map
    assert found == {"preblock.family": "vit", "preblock.image_size": "8", "preblock.patch_size": "4"}
