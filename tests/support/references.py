"""Artifacts whose n-gram tables lie in a safetensors file outside, made of the stored artifact `ngrams`."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from preblock.service.artifacts.names import DATA, MANIFEST, NGRAM_ROWS_GRAPH, NGRAMS_GRAPH
from preblock.service.runtime.loader import ModelLoader
from preblock.service.runtime.repository import Repository
from tests.support.artifacts import copy_artifact

SHARD = "model.safetensors"


def make_referenced(repository: Path, checkpoint: Path) -> Path:
    """Add the model `ngrams` to `repository`, with its tables in a file in `checkpoint`; return the artifact."""
    folder = copy_artifact("ngrams", repository)
    manifest = json.loads((folder / MANIFEST).read_text())
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer, table in enumerate(manifest["ngram_tables"]):
        begin, shape = table["parts"][0]["begin"], (table["rows"], table["width"])
        rows = np.fromfile(folder / DATA, np.float32, table["rows"] * table["width"], offset=begin)
        tensors[f"layers.{layer}.weight"] = rows.reshape(shape)
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file(tensors, checkpoint / SHARD)
    for graph in (NGRAMS_GRAPH, NGRAM_ROWS_GRAPH):
        for files in (manifest["graphs"], manifest["files"]):
            del files[graph]
        (folder / graph).unlink()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    refer(folder, checkpoint / SHARD)
    return folder


def refer(folder: Path, shard: Path) -> None:
    """Let the artifact in `folder` refer to the file `shard` as it is now."""
    content = shard.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])

    def change(manifest: dict[str, Any]) -> None:
        for layer, table in enumerate(manifest["ngram_tables"]):
            begin = length + header[f"layers.{layer}.weight"]["data_offsets"][0]
            table["parts"] = [{"file": str(shard), "begin": begin, "rows": table["rows"]}]
        status = shard.stat()
        manifest["references"] = {
            str(shard): {
                "bytes": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "header_sha256": hashlib.sha256(content[:length]).hexdigest(),
                "sha256": None,
            }
        }

    edit_manifest(folder, change)


def open_repository(folder: Path, *roots: Path) -> Repository:
    """Open the repository of the artifact in `folder`, with these folders for references."""
    return Repository(folder.parents[1], ModelLoader(reference_roots=roots))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of the artifact in `folder`."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
