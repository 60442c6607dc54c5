"""The errors of tables stored in another type than float32, against their values in the source.

Computation stays in float32. A table is never in memory as a whole: it is compared some rows at a time.

Letters: V rows and D width of a table.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.errors import ExportError
from preblock.export.external_data import CHUNK_VALUES, place_of, read_initializers, split_rows
from preblock.export.progress import Report, StepProgress
from preblock.export.stored_tables import parts_of
from preblock.export.table_formats import Parts, TableFormat, table_names
from preblock.models.frontend_data import FrontEndData
from preblock.service.artifacts.names import DATA
from preblock.service.artifacts.parity import StoredTable

Array = NDArray[Any]
PIECE_VALUES = 2**14
"""Values compared at once. Their float64 values fit into a cache: four times as fast as larger pieces."""


def compare_tables(
    data: FrontEndData, format_: TableFormat, folder: Path, report: Report = lambda _: None
) -> dict[str, StoredTable]:
    """Return the errors of the tables stored in `folder` against those of `data`, by name.

    `report` receives the progress of a long step.

    Raises:
        ExportError: a value is not finite, or too large for the type; or a stored value is not the rounded one.

    """
    report("comparing the tables")
    tensors = read_initializers(folder)
    tables = {name: data.tensors[name] for name in table_names(data.config)}
    progress = StepProgress(report, "comparing the tables", sum(4 * table.size for table in tables.values()))
    found = {}
    for name, table in tables.items():
        found[name] = compare_table(name, table, parts_of(name, tensors), format_, folder, progress)
    return found


def compare_table(
    name: str,
    table: Array,
    tensors: Mapping[str, onnx.TensorProto],
    format_: TableFormat,
    folder: Path,
    progress: StepProgress,
) -> StoredTable:
    """Return the errors of the parts in `tensors` against `table`, (V, D)."""
    external = {ending: tensor for ending, tensor in tensors.items() if len(tensor.dims) > 1}
    whole = {ending: onnx.numpy_helper.to_array(tensor) for ending, tensor in tensors.items() if ending not in external}
    largest, total, cosine = 0.0, 0.0, 1.0
    for rows, parts in _read_pieces(table, external, folder):
        stored = format_.widen({**whole, **parts})
        _check_finite(name, rows, stored, format_)
        again = format_.narrow(rows, whole)
        if not all(again[ending].tobytes() == part.tobytes() for ending, part in parts.items()):
            raise ExportError(f"{folder / DATA}: {name} differs from its values rounded to {format_.dtype}")
        worst, mean, nearest = _errors(rows.astype(np.float64), stored.astype(np.float64))
        largest, total, cosine = max(largest, worst), total + mean, min(cosine, nearest)
        progress.add(4 * rows.size)
    taken = sum(place_of(tensor)[1] for tensor in external.values()) + sum(part.nbytes for part in whole.values())
    return StoredTable(
        rows=table.shape[0],
        width=table.shape[1],
        max_abs=largest,
        mean_abs=total / table.size,
        min_cosine=cosine,
        bytes=taken,
        saved=4 * table.size - taken,
    )


def _read_pieces(table: Array, tensors: Mapping[str, onnx.TensorProto], folder: Path) -> Iterator[tuple[Array, Parts]]:
    """Yield the rows of `table` in float32, a few at a time, and their stored parts."""
    first = 0
    for chunk in split_rows(table, CHUNK_VALUES):
        parts = {ending: _read_rows(tensor, folder, first, len(chunk)) for ending, tensor in tensors.items()}
        first += len(chunk)
        begin = 0
        for rows in split_rows(chunk, PIECE_VALUES):
            end = begin + len(rows)
            yield rows.astype(np.float32, copy=False), {ending: part[begin:end] for ending, part in parts.items()}
            begin = end


def _check_finite(name: str, rows: Array, stored: Array, format_: TableFormat) -> None:
    """Raise ExportError for a value that is not finite, in the source or after the rounding."""
    finite = np.isfinite(rows) & np.isfinite(stored)
    if not finite.all():
        values = rows[~finite]
        value = float(values[np.abs(values).argmax()])
        raise ExportError(f"--dtype: got {format_.dtype}, expected a type that holds {value:g}, a value of {name}")


def _errors(exact: Array, stored: Array) -> tuple[float, float, float]:
    """Return the largest error, the sum of all, and the least cosine of a row that differs."""
    error = np.abs(stored - exact)
    worst = error.max(1)
    lengths = np.sqrt(np.vecdot(exact, exact)) * np.sqrt(np.vecdot(stored, stored))
    cosines = np.vecdot(exact, stored) / lengths.clip(min=np.finfo(np.float64).tiny)
    return float(worst.max()), float(error.sum()), float(np.where(worst > 0, cosines, 1.0).min())


def _read_rows(tensor: onnx.TensorProto, folder: Path, first: int, count: int) -> Array:
    """Return some rows of `tensor`. Reading, unlike mapping, keeps no pages of rows used once."""
    offset, length = place_of(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    row = length // tensor.dims[0]
    content = np.fromfile(folder / DATA, np.uint8, count * row, offset=offset + first * row)
    return content.view(dtype).reshape(count, *tensor.dims[1:])
