"""The stored artifacts are those that an export makes today."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from preblock.service.artifacts.names import DATA, MANIFEST
from tests.data.make_artifacts import RECIPES, make_artifact
from tests.support.artifacts import STORED, WEIGHTS


def read_graph(file: Path) -> onnx.ModelProto:
    """Return a graph without the version of its producer."""
    model = onnx.load(file, load_external_data=False)
    model.producer_version = ""
    return model


def read_manifest(file: Path) -> dict[str, Any]:
    """Return a manifest without versions, and with names alone of the graphs, which hold a version too."""
    manifest: dict[str, Any] = json.loads(file.read_text())
    del manifest["versions"]
    files = {name: None if name.endswith(".onnx") else found for name, found in manifest["files"].items()}
    return manifest | {"files": files}


def test_every_stored_artifact_has_recipe() -> None:
    assert sorted(folder.name for folder in STORED.iterdir()) == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_stored_artifact_matches_new_export(name: str, tmp_path: Path) -> None:
    made, stored = make_artifact(name, tmp_path), STORED / name
    assert sorted(file.name for file in made.iterdir()) == sorted(file.name for file in stored.iterdir())
    assert read_manifest(made / MANIFEST) == read_manifest(stored / MANIFEST)
    for file in made.iterdir():
        if file.suffix == ".onnx":
            assert read_graph(file) == read_graph(stored / file.name)
        elif file.name in (DATA, WEIGHTS):
            assert file.read_bytes() == (stored / file.name).read_bytes()
