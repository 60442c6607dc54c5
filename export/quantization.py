"""Quantization of tables: rounding to another type than float32 while writing an artifact, and its errors.

Computation stays in float32. A table is never in memory as a whole: it is rounded in chunks from file to file, and
widened row by row at lookup.

Letters: V rows and D width of a table.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from preblock.export.errors import ExportError
from preblock.export.external_data import place_of, set_place
from preblock.export.graph import MODULE, replace_fields, save_graph
from preblock.export.progress import Report, StepProgress
from preblock.export.stored_tables import TYPES, of_bytes, parts_of, read_tensors, tables_of
from preblock.export.table_formats import SCALE, WIDTH, TableFormat
from preblock.models.frontend import FrontEnd
from preblock.models.modules.tokens import TokenEmbedding
from preblock.service.artifacts.names import DATA, TABLE_GRAPHS
from preblock.service.artifacts.parity import StoredTable

CHUNK_VALUES = 2**20
"""Values of a table processed at once, to bound the working memory."""
FLUSH_BYTES = 2**26
"""Bytes between two flushes to disk."""
ALIGNMENT_BYTES = 64
"""Alignment of tensors in the data file, in bytes."""


def shrink_tables(frontend: FrontEnd) -> FrontEnd:
    """Return `frontend` with distinct tables of two rows, to export a graph whose tables are replaced later."""
    small = FrontEnd.from_tensors(frontend.config, frontend.state_dict()).eval()
    for number, (name, table) in enumerate(tables_of(frontend).items()):
        module = small.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(torch.full((2, table.shape[1]), number + 1.0))
        if isinstance(module, TokenEmbedding):
            module.padding_idx = None  # out of range here, and used only in training
    return small


def write_tables(frontend: FrontEnd, format_: TableFormat, folder: Path, report: Report = lambda _: None) -> None:
    """Replace the tables of the graphs in `folder` by those of `frontend`, stored in `format_`.

    `report` receives the progress of a long step.
    """
    tables = {MODULE + name: table for name, table in tables_of(frontend).items()}
    reads = 2 if format_.scale == "tensor" else 1
    total = reads * sum(4 * table.numel() for table in tables.values())
    step = f"rounding the tables to {format_.dtype}"
    report(step)
    progress = StepProgress(report, step, total)
    graphs = [folder / graph for graph in TABLE_GRAPHS if (folder / graph).is_file()]
    models = [onnx.load(graph, load_external_data=False) for graph in graphs]
    draft = folder / f"{DATA}.new"
    with (folder / DATA).open("rb") as before, draft.open("xb") as data:
        stored = {name: _write_table(name, table, format_, data, progress) for name, table in tables.items()}
        for model in models:
            for tensor in model.graph.initializer:
                if tensor.name not in stored:
                    stored[tensor.name] = [_copy(tensor, before, data)]
            nodes: list[onnx.NodeProto] = []
            for node in model.graph.node:
                quantized = node.op_type == "Gather" and node.input[0] in tables
                nodes += _widen(node, format_.nodes(tables[node.input[0]].shape[1])) if quantized else [node]
            initializers = [part for tensor in model.graph.initializer for part in stored[tensor.name]]
            replace_fields(model.graph, node=nodes, initializer=initializers)
    draft.replace(folder / DATA)
    for graph, model in zip(graphs, models, strict=True):
        save_graph(model, graph)


def compare_tables(
    frontend: FrontEnd, format_: TableFormat, folder: Path, report: Report = lambda _: None
) -> dict[str, StoredTable]:
    """Return the errors of the tables stored in `folder` against those of `frontend`, by name.

    `report` receives the progress of a long step.

    Raises:
        ExportError: a value is not finite, or too large for the type; or a stored value is not the rounded one.

    """
    report("comparing the tables")
    tensors, tables = read_tensors(folder), tables_of(frontend)
    progress = StepProgress(report, "comparing the tables", sum(4 * table.numel() for table in tables.values()))
    return {
        name: _compare_table(name, table, parts_of(name, tensors), format_, folder, progress)
        for name, table in tables.items()
    }


def _read_chunks(table: Tensor, progress: StepProgress) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of `table` in float32 chunks, each with the index of its first row, and count their bytes."""
    rows = max(1, CHUNK_VALUES // table.shape[1])
    for begin in range(0, len(table), rows):
        chunk = table[begin : begin + rows].to(torch.float32)
        yield begin, chunk
        progress.add(chunk.nbytes)


def _write_table(
    name: str, table: Tensor, format_: TableFormat, data: BinaryIO, progress: StepProgress
) -> list[onnx.TensorProto]:
    """Append the rounded `table` to the data file, and return the initializers of its parts."""
    whole = format_.whole(rows for _, rows in _read_chunks(table, progress))
    tensors, begins = [], {}
    end = data.seek(0, os.SEEK_END)
    for ending, row in format_.narrow(table[:1].to(torch.float32), whole).items():
        shape = (len(table), *row.shape[1:])
        tensors.append(onnx.TensorProto(name=name + ending, data_type=TYPES[row.dtype], dims=shape))
        begins[ending] = end + -end % ALIGNMENT_BYTES
        set_place(tensors[-1], begins[ending], len(table) * row.nbytes)
        end = begins[ending] + len(table) * row.nbytes
    written = 0
    for first, rows in _read_chunks(table, progress):
        for ending, part in format_.narrow(rows, whole).items():
            data.seek(begins[ending] + first * part[0].nbytes)
            data.write(part.reshape(-1).view(torch.uint8).numpy().data)
            written += part.nbytes
        if written >= FLUSH_BYTES:  # spreads the disk writes, which progress would else not cover
            data.flush()
            os.fdatasync(data.fileno())
            written = 0
    shared = [onnx.numpy_helper.from_array(part.numpy(), name + ending) for ending, part in whole.items()]
    return tensors + shared


def _copy(tensor: onnx.TensorProto, before: BinaryIO, data: BinaryIO) -> onnx.TensorProto:
    """Return `tensor`, copied from the data file `before` to the end of `data` if it is external."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        offset, length = place_of(tensor)
        end = data.seek(0, os.SEEK_END)
        data.write(bytes(-end % ALIGNMENT_BYTES))
        set_place(tensor, data.tell(), length)
        before.seek(offset)
        data.write(before.read(length))
    return tensor


def _widen(gather: onnx.NodeProto, nodes: str) -> list[onnx.NodeProto]:
    """Return the nodes to replace `gather`: `nodes` in ONNX's textual form, under its names."""
    table, index = gather.input
    vectors = gather.output[0]
    names = {"codes": table, "scale": table + SCALE, "width": table + WIDTH, "index": index, "vectors": vectors}
    graph = onnx.parser.parse_graph(
        f"widen (int64[batch, length] index) => (float[batch, length, width] vectors) {{ {nodes} }}"
    )
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, f"{vectors}.{name}") for name in side]
    return list(graph.node)


def _compare_table(
    name: str,
    table: Tensor,
    tensors: Mapping[str, onnx.TensorProto],
    format_: TableFormat,
    folder: Path,
    progress: StepProgress,
) -> StoredTable:
    """Return the errors of the parts in `tensors` against `table`, (V, D)."""
    external = {ending: tensor for ending, tensor in tensors.items() if len(tensor.dims) > 1}
    whole = {
        ending: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for ending, tensor in tensors.items()
        if ending not in external
    }
    largest, total, cosine = 0.0, 0.0, 1.0
    for first, rows in _read_chunks(table, progress):
        parts = {ending: _read_rows(tensor, folder, first, len(rows)) for ending, tensor in external.items()}
        exact, stored = rows.double(), format_.widen({**whole, **parts}).double()
        error = (stored - exact).abs_()
        worst = error.amax(1)
        if not worst.isfinite().all():
            values = rows[~error.isfinite()]
            value = float(values[values.abs().argmax()])
            raise ExportError(f"--dtype: got {format_.dtype}, expected a type that holds {value:g}, a value of {name}")
        again = format_.narrow(rows, whole)
        if not all(torch.equal(again[ending], part) for ending, part in parts.items()):
            raise ExportError(f"{folder / DATA}: {name} differs from its values rounded to {format_.dtype}")
        largest, total = max(largest, float(worst.max())), total + float(error.sum())
        lengths = torch.linalg.vecdot(exact, exact).sqrt() * torch.linalg.vecdot(stored, stored).sqrt()
        cosines = torch.linalg.vecdot(exact, stored) / lengths.clamp(min=torch.finfo(torch.float64).tiny)
        cosine = min(cosine, float(cosines.where(worst > 0, 1.0).min()))
    taken = sum(place_of(tensor)[1] for tensor in external.values()) + sum(part.nbytes for part in whole.values())
    return StoredTable(
        rows=table.shape[0],
        width=table.shape[1],
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
