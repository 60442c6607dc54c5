"""Every quantization, rounded by NumPy."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from preblock.export.exporter import ExportResult, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.table_formats import find_format
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.steps import Tokens
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import GRAPH, MANIFEST

V, D, M = 90, 40, 24
"""The width is no multiple of a block."""
WAYS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "int8-tensor": {"dtype": "int8", "scale": "tensor"},
    "int4": {"dtype": "int4"},
}
ALL = pytest.mark.parametrize("way", WAYS)

Array = NDArray[Any]


def steps(values: Array, levels: int) -> Array:
    """Round `values` to whole steps; the largest value is `levels` steps."""
    step = np.abs(values).max() / np.float32(levels)
    whole: Array = np.rint(values / step) * step
    return whole


def rounded(table: Array, way: str) -> Array:
    """Return `table` after rounding to its stored type."""
    if way == "int8":
        return np.stack([steps(row, 127) for row in table])
    if way == "int8-tensor":
        return steps(table, 127)
    if way == "int4":
        blocks = range(0, table.shape[1], 32)
        return np.stack([np.concatenate([steps(row[at : at + 32], 7) for at in blocks]) for row in table])
    short: Array = table.astype(getattr(ml_dtypes, way, np.float16)).astype(np.float32)
    return short


def run(folder: Path, feeds: dict[str, Array], graph: str = GRAPH) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(folder / graph, options, providers=["CPUExecutionProvider"])
    found: Array = session.run(None, feeds)[0]
    return found


def seal(folder: Path, **values: Any) -> None:
    """Give the manifest the hashes of the files as they are now, and other values."""
    manifest = json.loads((folder / MANIFEST).read_text()) | values
    manifest["files"] = {name: describe(folder / name).model_dump() for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def tiny(*further: Any) -> FrontEnd:
    torch.manual_seed(0)
    steps_ = (Tokens(rows=30, width=8), *further)
    return FrontEnd(FrontEndConfig(family="tiny", steps=steps_, max_len=20))


def put(frontend: FrontEnd, root: Path, dtype: str) -> ExportResult:
    return export_loaded(LoadedSource(frontend.data(), Source(kind="module")), "m", root, format_=find_format(dtype))
