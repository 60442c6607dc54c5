"""The comparison of stored tables with the tables of the front-end.

Letters: V rows and D width of a table.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor

from preblock.export.errors import ExportError
from preblock.export.external_data import place_of
from preblock.export.graph import MODULE
from preblock.export.progress import Report, StepProgress
from preblock.export.stored_tables import DTYPES, initializers_of, of_bytes, row_parts, table_progress, tables_of
from preblock.export.table_formats import ENDINGS, TableFormat
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.manifest import DATA
from preblock.service.artifacts.parity import StoredTable


def compare_tables(
    frontend: FrontEnd, format_: TableFormat, folder: Path, report: Report = lambda _: None
) -> dict[str, StoredTable]:
    """Return the errors of the tables stored in `folder` against those of `frontend`, by name.

    `report` receives the progress of a long step.

    Raises:
        ExportError: a value is not finite, or too large for the type; or a stored value is not the rounded one.

    """
    tensors, tables = initializers_of(folder), tables_of(frontend)
    progress = table_progress(report, "comparing the tables", tables)
    return {
        name: _compare_table(
            name,
            format_,
            table,
            {ending: tensors[MODULE + name + ending] for ending in ENDINGS if MODULE + name + ending in tensors},
            folder,
            progress,
        )
        for name, table in tables.items()
    }


def _compare_table(
    name: str,
    format_: TableFormat,
    table: Tensor,
    tensors: Mapping[str, onnx.TensorProto],
    folder: Path,
    progress: StepProgress,
) -> StoredTable:
    """Return the errors of the parts in `tensors` against `table`, (V, D)."""
    whole = {
        ending: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for ending, tensor in tensors.items()
        if len(tensor.dims) < 2
    }
    largest, total, cosine = 0.0, 0.0, 1.0
    for first, rows in row_parts(table):
        parts = {
            ending: _read_rows(tensor, folder, first, len(rows))
            for ending, tensor in tensors.items()
            if ending not in whole
        }
        worth = format_.widen({**whole, **parts})
        exact, stored = rows.double(), worth.double()
        error = (stored - exact).abs_()
        worst = error.amax(1)
        if not worst.isfinite().all():
            values = rows[~error.isfinite()]
            value = float(values[values.abs().argmax()])
            raise ExportError(f"--dtype: got {format_.dtype}, allowed a type that holds {value:g}, a value of {name}")
        again = format_.narrow(rows, whole)
        if not all(torch.equal(again[ending], part) for ending, part in parts.items()):
            raise ExportError(f"{folder / DATA}: holds something else than {name} rounded to {format_.dtype}")
        largest, total = max(largest, float(worst.max())), total + float(error.sum())
        lengths = torch.linalg.vecdot(exact, exact).sqrt() * torch.linalg.vecdot(stored, stored).sqrt()
        cosines = torch.linalg.vecdot(exact, stored) / lengths.clamp(min=torch.finfo(torch.float64).tiny)
        cosine = min(cosine, float(cosines.where(worst > 0, 1.0).min()))
        progress.add(rows.nbytes)
    taken = sum(math.prod(tensor.dims) * DTYPES[tensor.data_type].itemsize for tensor in tensors.values())
    height, width = table.shape
    return StoredTable(
        rows=height,
        width=width,
        max_abs=largest,
        mean_abs=total / table.numel(),
        min_cosine=cosine,
        bytes=taken,
        saved=4 * table.numel() - taken,
    )


def _read_rows(tensor: onnx.TensorProto, folder: Path, first: int, count: int) -> Tensor:
    """Return some rows of `tensor`. Reading, unlike mapping, keeps no pages of rows used once."""
    offset, length = place_of(tensor)
    row = length // tensor.dims[0]
    content = np.fromfile(folder / DATA, np.uint8, count * row, offset=offset + first * row)
    return of_bytes(content, tensor.data_type, (count, *tensor.dims[1:]))
