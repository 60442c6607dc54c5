"""The tables of a traced graph, replaced by rounded ones: until exports write graphs from steps.

Letters: V rows and D width of a table.
"""

from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import onnx
import torch
from torch import Tensor, nn

from preblock.export.external_data import ALIGNMENT_BYTES, Array, DataFile, place_of, set_place
from preblock.export.graph import MODULE, replace_fields, save_graph
from preblock.export.progress import Report, StepProgress
from preblock.export.quantization import compare_table
from preblock.export.stored_tables import parts_of, read_tensors, tables_of
from preblock.export.table_formats import SCALE, WIDTH, TableFormat
from preblock.models.frontend import FrontEnd
from preblock.models.modules.tokens import TokenEmbedding
from preblock.service.artifacts.names import DATA, TABLE_GRAPHS
from preblock.service.artifacts.parity import StoredTable


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
    tables = {MODULE + name: _array(table) for name, table in tables_of(frontend).items()}
    reads = 2 if format_.scale == "tensor" else 1
    step = f"rounding the tables to {format_.dtype}"
    report(step)
    progress = StepProgress(report, step, reads * sum(4 * table.size for table in tables.values()))
    graphs = [folder / graph for graph in TABLE_GRAPHS if (folder / graph).is_file()]
    models = [onnx.load(graph, load_external_data=False) for graph in graphs]
    draft = folder / f"{DATA}.new"
    with (folder / DATA).open("rb") as before, draft.open("xb") as data:
        file = DataFile(data, progress, ALIGNMENT_BYTES)
        stored = {name: file.write_rounded(name, table, format_) for name, table in tables.items()}
        data.seek(0, 2)
        for model in models:
            for tensor in model.graph.initializer:
                if tensor.name not in stored:
                    stored[tensor.name] = [_copy(tensor, before, data)]
            nodes: list[onnx.NodeProto] = []
            for node in model.graph.node:
                quantized = node.op_type == "Gather" and node.input[0] in tables
                nodes += _widen(node, format_.nodes(tables[node.input[0]].shape[1], 2)) if quantized else [node]
            initializers = [part for tensor in model.graph.initializer for part in stored[tensor.name]]
            replace_fields(model.graph, node=nodes, initializer=initializers)
    draft.replace(folder / DATA)
    for graph, model in zip(graphs, models, strict=True):
        save_graph(model, graph)


def compare_tables(
    frontend: FrontEnd, format_: TableFormat, folder: Path, report: Report = lambda _: None
) -> dict[str, StoredTable]:
    """Return the errors of the tables stored in `folder` against those of `frontend`, by name."""
    report("comparing the tables")
    tensors, tables = read_tensors(folder), tables_of(frontend)
    progress = StepProgress(report, "comparing the tables", sum(4 * table.numel() for table in tables.values()))
    return {
        name: compare_table(name, _array(table), parts_of(name, tensors), format_, folder, progress)
        for name, table in tables.items()
    }


def _array(table: Tensor) -> Array:
    table = table.detach()
    if table.dtype == torch.bfloat16:
        return table.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = table.numpy()
    return array


def _copy(tensor: onnx.TensorProto, before: BinaryIO, data: BinaryIO) -> onnx.TensorProto:
    """Return `tensor`, copied from the data file `before` to the end of `data` if it is external."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        offset, length = place_of(tensor)
        end = data.seek(0, 2)
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
