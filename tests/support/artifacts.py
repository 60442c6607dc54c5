"""Copies of the stored artifacts, for servers without an export."""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.service.artifacts.names import DATA, GRAPH
from tests.support.paths import ROOT

STORED = ROOT / "tests" / "data" / "artifacts"
WEIGHTS = "weights.json"
"""In a stored artifact, how to draw its data file; the folder then holds no data file."""
STANDARD_DEVIATION = np.float32(0.02)
Floats = NDArray[np.float32]


def draw_tables(seed: int, sizes: list[int]) -> list[Floats]:
    """Return tables of these sizes from normal(0, 0.02) with PCG64(seed): the same on every processor.

    Values beyond 3.5 standard deviations become 3.5. NumPy computes the values beyond 3.65 by logarithms of the C
    library, and these differ between its versions.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = (generator.standard_normal(size, dtype=np.float32) for size in sizes)
    return [values.clip(-3.5, 3.5) * STANDARD_DEVIATION for values in drawn]


def draw_data(weights: dict[str, Any]) -> bytes:
    """Return the data file for a `weights.json`."""
    tables = draw_tables(weights["seed"], [table["size"] for table in weights["tables"]])
    for table, values in zip(weights["tables"], tables, strict=True):
        for index, value in table["changed"].items():
            values[int(index)] = value
    placed = {table["offset"]: values for table, values in zip(weights["tables"], tables, strict=True)}
    return b"".join(placed[offset].tobytes() for offset in sorted(offset for offset in placed if offset is not None))


def copy_artifact(stored: str, repository: Path, name: str | None = None) -> Path:
    """Add a stored artifact to `repository` as the next version of `name`, and return its folder.

    A server sees all of the version or nothing, as after an export.
    """
    model = repository / (name or stored)
    draft = model / f".tmp-{stored}"
    shutil.copytree(STORED / stored, draft)
    if (draft / WEIGHTS).exists():
        (draft / DATA).write_bytes(draw_data(json.loads((draft / WEIGHTS).read_text())))
        (draft / WEIGHTS).unlink()
    folder = next(model / str(version) for version in count(1) if not (model / str(version)).exists())
    return draft.rename(folder)


def make_repository(root: Path, **models: str) -> Path:
    """Add a stored artifact for each keyword, the name of its model, and return `root`."""
    for name, stored in models.items():
        copy_artifact(stored, root, name)
    return root


def read_tables(folder: Path) -> dict[str, Floats]:
    """Return the tables of two dimensions of an artifact by the name of their step, as onnx reads them."""
    initializers = onnx.load(folder / GRAPH).graph.initializer
    tables = [tensor for tensor in initializers if "." in tensor.name and len(tensor.dims) == 2]
    return {tensor.name.split(".")[0]: np.array(onnx.numpy_helper.to_array(tensor)) for tensor in tables}
