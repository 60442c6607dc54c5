"""Quantization of tables: rounding to another type than float32 while writing an artifact.

Computation stays in float32. A table is never in memory as a whole: it is rounded in chunks from file to file, and
widened row by row at lookup.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import onnx
import torch
from torch import Tensor, nn

from preblock.export.external_data import place_of, set_place
from preblock.export.graph import MODULE, save_graph
from preblock.export.progress import Report, StepProgress
from preblock.export.stored_tables import TYPES, row_parts, table_progress, tables_of
from preblock.export.table_formats import SCALE, WIDTH, Parts, TableFormat
from preblock.models.frontend import FrontEnd
from preblock.models.modules.tokens import TokenEmbedding
from preblock.service.artifacts.manifest import DATA, TOKEN_GRAPHS

FLUSH_BYTES = 2**26
"""Bytes between two flushes to disk."""
ALIGNMENT_BYTES = 64
"""Alignment of tensors in the data file, in bytes."""


def sketch(frontend: FrontEnd) -> FrontEnd:
    """Return `frontend` with distinct tables of two rows, to export a graph whose tables are replaced later."""
    drawn = FrontEnd.from_tensors(frontend.config, frontend.state_dict()).eval()
    for number, (name, table) in enumerate(tables_of(frontend).items()):
        module = drawn.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(torch.full((2, table.shape[1]), number + 1.0))
        if isinstance(module, TokenEmbedding):
            module.padding_idx = None  # out of range here, and used only in training
    return drawn


def write_tables(frontend: FrontEnd, format_: TableFormat, folder: Path, report: Report = lambda _: None) -> None:
    """Replace the tables of the graphs in `folder` by those of `frontend`, stored in `format_`.

    `report` receives the progress of a long step.
    """
    tables = tables_of(frontend)
    progress = table_progress(
        report, f"rounding the tables to {format_.dtype}", tables, 1 + (format_.scale == "tensor")
    )
    models = {
        graph: onnx.load(folder / graph, load_external_data=False)
        for graph in TOKEN_GRAPHS
        if (folder / graph).is_file()
    }
    places: dict[str, tuple[int, int]] = {}
    layouts: dict[str, Parts] = {}
    draft = folder / f"{DATA}.new"
    with (folder / DATA).open("rb") as before, draft.open("xb") as data:
        for name, table in tables.items():
            layout = _layout(format_, table, progress)
            layouts[MODULE + name] = layout
            places |= _write_table(MODULE + name, format_, table, layout, data, progress)
        for model in models.values():
            _gather_narrow(model.graph, format_, layouts)
            for tensor in model.graph.initializer:
                if tensor.data_location != onnx.TensorProto.EXTERNAL:
                    continue
                if tensor.name not in places:
                    places[tensor.name] = _copy(tensor, before, data)
                set_place(tensor, *places[tensor.name])
    draft.replace(folder / DATA)
    for graph, model in models.items():
        save_graph(model, folder / graph)


def _layout(format_: TableFormat, table: Tensor, progress: StepProgress) -> Parts:
    """Return the parts of a stored `table`. Parts stored for each row have only type and shape, on "meta"."""

    def read() -> Iterator[Tensor]:
        for _, rows in row_parts(table):
            yield rows
            progress.add(rows.nbytes)

    whole = format_.whole(read())
    first = format_.narrow(table[:1].to(torch.float32), whole)
    of_rows = {
        ending: torch.empty((len(table), *part.shape[1:]), dtype=part.dtype, device="meta")
        for ending, part in first.items()
    }
    return of_rows | whole


def _write_table(
    name: str, format_: TableFormat, table: Tensor, layout: Parts, data: BinaryIO, progress: StepProgress
) -> dict[str, tuple[int, int]]:
    """Write the rounded `table` to the data file, and return offset and length of its parts by initializer name."""
    whole = {ending: part for ending, part in layout.items() if not part.is_meta}
    places, end = {}, data.seek(0, os.SEEK_END)
    for ending, part in layout.items():
        if part.is_meta:
            begin = end + -end % ALIGNMENT_BYTES
            places[ending], end = (begin, part.nbytes), begin + part.nbytes
    written = 0
    for first, rows in row_parts(table):
        for ending, part in format_.narrow(rows, whole).items():
            data.seek(places[ending][0] + first * part[0].nbytes)
            data.write(_bytes(part))
            written += part.nbytes
        if written >= FLUSH_BYTES:  # spreads the disk writes, which progress would else not cover
            data.flush()
            os.fdatasync(data.fileno())
            written = 0
        progress.add(rows.nbytes)
    return {name + ending: place for ending, place in places.items()}


def _gather_narrow(graph: onnx.GraphProto, format_: TableFormat, layouts: Mapping[str, Parts]) -> None:
    """Let `graph` gather from the stored tables, and widen the gathered rows."""
    before = onnx.GraphProto()
    before.CopyFrom(graph)
    del graph.node[:], graph.initializer[:]
    for node in before.node:
        layout = layouts.get(node.input[0]) if node.op_type == "Gather" else None
        graph.node.extend([node] if layout is None else _widening(format_, layout, node))
    for tensor in before.initializer:
        layout = layouts.get(tensor.name)
        graph.initializer.extend(
            [tensor] if layout is None else [_tensor(tensor.name + ending, part) for ending, part in layout.items()]
        )


def _widening(format_: TableFormat, layout: Parts, gather: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes to replace `gather`."""
    table, index = gather.input
    names = {
        "codes": table,
        "scale": table + SCALE,
        "width": table + WIDTH,
        "index": index,
        "vectors": gather.output[0],
    }
    graph = onnx.parser.parse_graph(
        f"widen (int64[batch, length] index) => (float[batch, length, width] vectors) {{ {format_.nodes(layout)} }}"
    )
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, f"{gather.output[0]}.{name}") for name in side]
    return list(graph.node)


def _tensor(name: str, part: Tensor) -> onnx.TensorProto:
    """Return the initializer for `part`. Parts stored for each row are external, without a place yet."""
    tensor = onnx.TensorProto(name=name, data_type=TYPES[part.dtype], dims=part.shape)
    if part.is_meta:
        tensor.data_location = onnx.TensorProto.EXTERNAL
    else:
        tensor.raw_data = bytes(_bytes(part))
    return tensor


def _copy(tensor: onnx.TensorProto, before: BinaryIO, data: BinaryIO) -> tuple[int, int]:
    """Copy `tensor` from one data file to the end of another, and return its new offset and length."""
    offset, length = place_of(tensor)
    end = data.seek(0, os.SEEK_END)
    data.write(bytes(-end % ALIGNMENT_BYTES))
    begin = data.tell()
    before.seek(offset)
    data.write(before.read(length))
    return begin, length


def _bytes(part: Tensor) -> memoryview:
    return part.reshape(-1).view(torch.uint8).numpy().data
