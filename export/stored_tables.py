"""The weights of an artifact, mapped from its data file; tables in stored types are widened at lookup.

Letters: B batch, L length, V rows and D width of a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.external_data import map_weights
from preblock.export.table_formats import CODES, ENDINGS, FORMATS, SCALE, TableFormat
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.bias import T5Config
from preblock.models.steps import Levels, Norm, Positions, Project, RmsNorm, Segments, Step, Tokens, Weights, names_of
from preblock.service.artifacts.names import BIAS_GRAPH, GRAPH
from preblock.service.core.types import Int64

CODE_TYPES = {
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "int4": onnx.TensorProto.UINT8,
}
"""ONNX type of the stored values, by the name of a format's type."""
BIAS_TABLE = "bias.weight"
Array = NDArray[Any]
Float32 = NDArray[np.float32]
T = TypeVar("T")


class StoredTable:
    """A table in a stored type; rows are widened at lookup.

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
        rows = _widen(self._format, {end: part[flat] if part.ndim > 1 else part for end, part in self._parts.items()})
        return rows.reshape(*ids.shape, rows.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """V and D."""
        return len(self), self.take(np.zeros(1, np.int64)).shape[1]


def read_format(folder: Path) -> TableFormat | None:
    """Return the format of the tables in `folder`; None for float32."""
    stored = parts_of("tokens.weight", read_tensors(folder))
    codes, scale = stored.get(CODES), stored.get(SCALE)
    for format_ in FORMATS:
        shared = scale is not None and not scale.dims
        if codes and codes.data_type == CODE_TYPES[format_.dtype] and shared == (format_.scale == "tensor"):
            return format_
    return None


def read_data(folder: Path, config: FrontEndConfig) -> tuple[FrontEndData, dict[str, StoredTable]]:
    """Return the front-end of the artifact in `folder`, and its tables in stored types by name.

    All weights are mapped from the data file. Derived tables and constants are left out.

    Raises:
        ValueError: a weight of `config` is missing or of another shape, or is stored but not of `config`.

    """
    mapped, expected, stored = _map(folder), shapes_of(config), read_stored(folder, config)
    tensors = {name: mapped[name] for name in expected if name in mapped and name not in stored}
    found: dict[str, tuple[int, ...]] = {name: values.shape for name, values in tensors.items()}
    found |= {name: table.shape for name, table in stored.items()}
    for name, shape in expected.items():
        if found.get(name) != shape:
            raise ValueError(f"{name}: got {found.get(name, 'nothing')}, expected {shape}")
    trained = {name for name in mapped if name.endswith((".weight", ".bias"))}
    if further := sorted(trained - set(expected)):
        raise ValueError(f"{further[0]}: got {mapped[further[0]].shape}, expected no such weight")
    for name, values in tensors.items():
        if values.dtype != np.float32:
            raise ValueError(f"{name}: got {values.dtype}, expected float32")
    return FrontEndData(config, tensors), stored


def read_stored(folder: Path, config: FrontEndConfig) -> dict[str, StoredTable]:
    """Return the tables of the artifact in `folder` in stored types by name; none for float32."""
    format_ = read_format(folder)
    if format_ is None:
        return {}
    mapped = _map(folder)
    parts = {name: parts_of(name, mapped) for name in tables_of(config)}
    return {name: StoredTable(format_, found) for name, found in parts.items() if found}


def shapes_of(config: FrontEndConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each trained weight, in the order and by the names of `FrontEnd.state_dict()`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, step, width in zip(names_of(config.steps), config.steps, (0, *config.widths), strict=False):
        shapes |= {f"{name}.{part}": shape for part, shape in _shapes_of_step(step, width).items()}
    if isinstance(config.bias, T5Config):
        shapes[BIAS_TABLE] = (config.bias.buckets, config.bias.heads)
    if config.per_layer:
        width, sizes = config.per_layer.width, config.per_layer
        shapes["per_layer.tokens.weight"] = (sizes.rows, sizes.layers * width)
        shapes["per_layer.project.weight"] = (sizes.layers * width, config.widths[config.lookup - 1])
        shapes["per_layer.norm.weight"] = (width,)
    if config.ngrams and not config.ngrams.referenced:
        columns = config.ngrams.width // config.ngrams.heads_of_layer
        shapes |= {
            f"ngrams.tables.{layer}.weight": (rows, columns) for layer, rows in enumerate(config.ngrams.table_rows)
        }
    return shapes


def tables_of(config: FrontEndConfig) -> tuple[str, ...]:
    """Return the names of the weights stored in the chosen type: tables of tokens, indices and positions.

    Norms, projections, weights of tokens and sinusoids stay in float32.
    """
    kinds = Tokens | Segments | Levels | Positions
    steps = zip(names_of(config.steps), config.steps, strict=True)
    begins = tuple(f"{name}." for name, step in steps if isinstance(step, kinds))
    return tuple(name for name in shapes_of(config) if name.startswith((*begins, "per_layer.tokens.", "ngrams.")))


def read_tensors(folder: Path) -> dict[str, onnx.TensorProto]:
    """Return the initializers of the main graph in `folder`, by name, without the data file."""
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {_name(tensor.name): tensor for tensor in graph.initializer}


def parts_of(table: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of the table named `table` among `tensors`, by the suffixes of their names."""
    return {ending: tensors[table + ending] for ending in ENDINGS if table + ending in tensors}


def _map(folder: Path) -> dict[str, Array]:
    """Return every initializer of the main graph in `folder`, and the table of its bias, by name."""
    mapped = {
        # To be deleted, as `_name`: new graphs hold projections as they are in `state_dict()`.
        _name(name): np.ascontiguousarray(values.T) if name.endswith(".transposed") else values
        for name, values in map_weights(folder).items()
    }
    if (folder / BIAS_GRAPH).is_file():
        for tensor in onnx.load(folder / BIAS_GRAPH).graph.initializer:
            if tensor.name in (BIAS_TABLE, "weight"):
                mapped[BIAS_TABLE] = onnx.numpy_helper.to_array(tensor)
    return mapped


def _shapes_of_step(step: Step, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a step, by their names in its module; `width` is that of its input."""
    match step:
        case Tokens():
            return {"weight": (step.rows, step.width)}
        case Weights():
            return {"weight": (step.rows, 1)}
        case Segments():
            return {"weight": (step.rows, width)} if step.table == "own" else {}
        case Levels():
            return {
                f"{place}.weight": (part.rows, width) for place, part in enumerate(step.levels) if part.table == "own"
            }
        case Positions(table="factorised", grid=(height, columns)):
            return {"rows.weight": (height, width), "columns.weight": (columns, width)}
        case Positions():
            return {"weight": (step.rows, width)} if step.table in ("learned", "hybrid") else {}
        case Norm() | RmsNorm():
            parts = {"weight": step.weight, "bias": step.bias if isinstance(step, Norm) else None}
            return {name: (width,) for name, keys in parts.items() if keys is not None}
        case Project():
            return {"weight": (step.width, width)} | ({} if step.bias is None else {"bias": (step.width,)})
        case _:
            return {}


def _name(stored: str) -> str:
    """Return the name of an initializer in `state_dict()`."""
    # To be deleted with the writer of old graphs, which adds a prefix and a suffix.
    return stored.removeprefix("frontend.").removesuffix(".transposed")


def _widen(format_: TableFormat, parts: Mapping[str, Array]) -> Float32:
    """Return all rows of `parts`, float32 (n, D)."""
    # To be deleted when the formats compute with NumPy: `return format_.widen(parts)`.
    if type(format_.codes).__module__ != "torch":
        return format_.widen(parts)  # type: ignore[arg-type, return-value]
    import ml_dtypes
    import torch

    tensors = {
        ending: torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)
        if part.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(np.array(part))
        for ending, part in parts.items()
    }
    rows: Float32 = format_.widen(tensors).numpy()
    return rows
