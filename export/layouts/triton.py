"""Writes the model configuration of NVIDIA Triton beside the versions of a model."""

import json
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.publication import versions
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import GRAPH, Manifest, StemManifest
from preblock.service.artifacts.records import Tensor

CONFIG = "config.pbtxt"
LIMITS = ("family", "image_size", "patch_size", "vocab_size", "max_len")
TYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def write_config(model: Path, version: int | None = None) -> Path:
    """Write `config.pbtxt` into `model`, the folder of a model's versions, and return its path.

    It describes `model.onnx` of `version`, by default the highest, and lists all versions with the same description.

    Raises:
        ExportError: the model has no version, or the file cannot be written.
        ArtifactError: a manifest is damaged.

    """
    descriptions = {version: _describe(read_manifest(model / str(version))) for version in versions(model)}
    if not descriptions:
        raise ExportError(f"{model} holds no version of a model; `preblock export` makes one")
    description = descriptions[version or max(descriptions)]
    same = [version for version, other in descriptions.items() if other == description]
    lines = [
        f"name: {json.dumps(model.name)}",
        'platform: "onnxruntime_onnx"',
        f"default_model_filename: {json.dumps(GRAPH)}",
        f"version_policy {{ specific {{ versions: {same} }} }}",
        *description,
    ]
    file, draft = model / CONFIG, model / f".{CONFIG}"
    try:
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise ExportError(f"{file}: {error.strerror}") from error
    return file


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
