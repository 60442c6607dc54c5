"""The weights of an artifact, mapped from its data file; tables in stored types are widened at lookup.

Letters: B batch, L length, V rows and D width of a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.external_data import map_weights, read_initializers
from preblock.export.table_formats import CODES, ENDINGS, TableFormat, find_stored, table_names, transposed_names
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.service.artifacts.names import BIAS_GRAPH
from preblock.service.core.types import Int64

Array = NDArray[Any]
Float32 = NDArray[np.float32]
T = TypeVar("T")


class NarrowTable:
    """A table in a narrower type than float32; rows are widened at lookup.

    Args:
        format_: stored type.
        parts: parts of the table; they may be mapped from a file.

    """

    def __init__(self, format_: TableFormat, parts: Mapping[str, Array]) -> None:
        self._format, self._parts = format_, parts

    def __len__(self) -> int:
        """V."""
        return len(self._parts[CODES])

    def take(self, ids: Int64) -> Float32:
        """Return the rows `ids` (...), float32 (..., D)."""
        flat = ids.reshape(-1)
        rows: Float32 = self._format.widen(
            {end: part[flat] if part.ndim > 1 else part for end, part in self._parts.items()}
        )
        return rows.reshape(*ids.shape, rows.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """V and D."""
        return len(self), self.take(np.zeros(1, np.int64)).shape[1]


def read_data(folder: Path, config: FrontEndConfig) -> tuple[FrontEndData, dict[str, NarrowTable]]:
    """Return the front-end of the artifact in `folder`, and its tables in stored types by name.

    All weights are mapped from the data file. Derived tables and constants are left out.

    Raises:
        ValueError: a weight of `config` is missing or of another shape, or is stored but not of `config`.

    """
    mapped, expected, stored = map_weights(folder), shapes_of(config), read_stored(folder, config)
    if (folder / BIAS_GRAPH).is_file():
        tensors = onnx.load(folder / BIAS_GRAPH).graph.initializer
        mapped |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
    mapped |= {name: mapped[name].T for name in transposed_names(config) if name in mapped}
    own = {name: mapped[name] for name in expected if name in mapped and name not in stored}
    found: dict[str, tuple[int, ...]] = {name: values.shape for name, values in own.items()}
    found |= {name: table.shape for name, table in stored.items()}
    for name, shape in expected.items():
        if found.get(name) != shape:
            raise ValueError(f"{name}: got {found.get(name, 'nothing')}, expected {shape}")
    trained = {name for name in mapped if name.endswith((".weight", ".bias"))}
    if further := sorted(trained - set(expected)):
        raise ValueError(f"{further[0]}: got {mapped[further[0]].shape}, expected no such weight")
    for name, values in own.items():
        if values.dtype != np.float32:
            raise ValueError(f"{name}: got {values.dtype}, expected float32")
    return FrontEndData(config, own), stored


def read_stored(folder: Path, config: FrontEndConfig) -> dict[str, NarrowTable]:
    """Return the tables of the artifact in `folder` in stored types by name; none for float32."""
    format_ = find_stored(read_initializers(folder))
    if format_ is None:
        return {}
    mapped = map_weights(folder)
    parts = {name: parts_of(name, mapped) for name in table_names(config)}
    return {name: NarrowTable(format_, found) for name, found in parts.items() if found}


def parts_of(table: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of the table named `table` among `tensors`, by the suffixes of their names."""
    return {ending: tensors[table + ending] for ending in ENDINGS if table + ending in tensors}
