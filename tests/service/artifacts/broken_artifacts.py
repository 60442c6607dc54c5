"""Changes that break an artifact, and the error of a repository that opens it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from preblock.service.artifacts.names import GRAPH, MANIFEST
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.repository import Repository

TOKENS = f"{GRAPH} tokens.weight"
LENGTH = 12800
"""Bytes of the tokens, 100 rows; the positions, 50 rows, follow them in the data file."""


def seal(folder: Path, **values: Any) -> None:
    """Give the manifest the hashes of the files as they are now, and other values."""
    manifest = json.loads((folder / MANIFEST).read_text()) | values
    for name in set(manifest["files"]):
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        Repository(folder.parent.parent)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("gpt/1/")
    return str(refused.value).removeprefix("gpt/1/")


def edit(folder: Path, change: Callable[[onnx.ModelProto], object], graph: str = GRAPH) -> None:
    """Change a graph, and seal the artifact again."""
    model = onnx.load(folder / graph, load_external_data=False)
    change(model)
    (folder / graph).write_bytes(model.SerializeToString())
    seal(folder)


def place(tensor: TensorProto, **entries: str) -> None:
    """Set entries of its external data."""
    for entry in tensor.external_data:
        entry.value = entries.pop(entry.key, entry.value)
    assert not entries


def external(name: str = "hidden", location: str = "/etc/passwd") -> TensorProto:
    tensor = TensorProto(name=name, data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def entries(*pairs: tuple[str, str]) -> Callable[[TensorProto], None]:
    def change(tensor: TensorProto) -> None:
        del tensor.external_data[:]
        for key, value in pairs:
            tensor.external_data.add(key=key, value=value)

    return change


def change_table(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Return a change of the first n-gram table of a manifest."""
    return lambda tables: tables[0].update(values)


def change_part(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Return a change of the first part of that table."""
    return lambda tables: tables[0]["parts"][0].update(values)
