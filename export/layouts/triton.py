"""Writes the model configuration of NVIDIA Triton beside the versions of a model."""

import json
import os
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.publication import replace_file, versions
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest, StemManifest, Tensor
from preblock.service.artifacts.names import GRAPH

CONFIG = "config.pbtxt"
MARK = "# Written by preblock. `convert` and `remove` write it again; without this line they keep the file."
LIMITS = ("family", "image_size", "patch_size", "vocab_size", "max_len")
TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def write_config(model: Path, version: int | None = None) -> Path:
    """Write `config.pbtxt` into `model`, the folder of a model's versions, and return its path.

    It describes `model.onnx` of `version`, by default the highest, and lists all versions with the same description.

    Raises:
        ExportError: the model has no version, or the file exists without `MARK` or cannot be written.
        ArtifactError: a manifest is damaged.

    """
    descriptions = {version: _describe(read_manifest(model / str(version))) for version in versions(model)}
    if not descriptions:
        raise ExportError(f"{model} holds no version of a model; `preblock export` makes one")
    file = model / CONFIG
    if os.path.lexists(file) and not _is_ours(file):
        raise ExportError(f"{file} exists, and was not written by preblock; remove it, or keep it as it is")
    description = descriptions[version or max(descriptions)]
    same = [version for version, other in descriptions.items() if other == description]
    lines = [
        MARK,
        f"name: {json.dumps(model.name)}",
        'platform: "onnxruntime_onnx"',
        f"default_model_filename: {json.dumps(GRAPH)}",
        f"version_policy {{ specific {{ versions: {same} }} }}",
        *description,
    ]
    try:
        with replace_file(file) as new:
            new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{file}: {error.strerror}") from error
    return file


def update_config(model: Path) -> None:
    """Adapt the `config.pbtxt` that `write_config` wrote to the versions in `model`; without any, remove it.

    Raises:
        OSError: it cannot be read or removed.
        ExportError: it cannot be written.
        ArtifactError: a manifest is damaged.

    """
    file = model / CONFIG
    if not file.is_file() or not _is_ours(file):
        return
    if versions(model):
        write_config(model)
    else:
        file.unlink()


def _is_ours(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.readline().strip() == MARK.encode()


def _describe(manifest: Manifest | StemManifest) -> list[str]:
    graph = manifest.graphs[GRAPH]
    limits = {name: getattr(manifest, name, None) for name in LIMITS} | getattr(manifest, "indices", {})
    return [
        "max_batch_size: 0  # every axis is among the dims",
        *(f"input {_tensor(tensor)}" for tensor in graph.inputs),
        *(f"output {_tensor(tensor)}" for tensor in graph.outputs),
        "# Keeps the proven arithmetic: at a higher level, onnxruntime fuses a norm with the sum before it.",
        "optimization { graph { level: -1 } }",
        "# Limits for callers: neither Triton nor the graph checks them.",
        *(
            f"parameters {{ key: {json.dumps(name)} value {{ string_value: {json.dumps(str(value))} }} }}"
            for name, value in limits.items()
            if value is not None
        ),
    ]


def _tensor(tensor: Tensor) -> str:
    dims = [size if isinstance(size, int) else -1 for size in tensor.shape]
    return f"{{ name: {json.dumps(tensor.name)} data_type: {TYPES[tensor.dtype]} dims: {dims} }}"
