"""Writes and describes `positioned.onnx`, a graph with an input for position embeddings in place of their lookup.

If all rows have one offset, their position embeddings are consecutive rows of the table. A call then passes a view of
the table, while the plain graph copies the rows first.

Letters: B batch, L length, P width of a table of positions.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_graph, make_model, make_node, make_tensor_value_info

from preblock.export.external_data import place_of
from preblock.export.graph import cut, load_plain, replace_fields, save_graph
from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, POSITIONED_GRAPH
from preblock.service.artifacts.records import Kernel, KernelTokens, PositionTable
from preblock.service.runtime.session import Session


def write_positioned(folder: Path, max_len: int | None) -> None:
    """Write `positioned.onnx` into `folder`, over the data file of the graph of `embeddings`.

    Its input `position_embeddings`, float32 (B or 1, L, P), replaces `offset`. No file is written unless all positions,
    `max_len` of them, are consecutive rows of a float32 table, independent of ids and mask.
    """
    model = load_plain(folder)
    graph, found = model.graph, _find_positions(model, folder, max_len)
    if found is None:
        return
    lookup, table, _ = found
    positions, lookup.output[0] = lookup.output[0], "unused"
    nodes, initializers, inputs = cut(graph, [EMBEDDINGS])
    for node in nodes:
        node.input[:] = [POSITION_EMBEDDINGS if name == positions else name for name in node.input]
    given = make_tensor_value_info(POSITION_EMBEDDINGS, TensorProto.FLOAT, ["positions", "length", table.dims[1]])
    replace_fields(graph, node=nodes, input=[*inputs, given], initializer=initializers, value_info=[])
    save_graph(model, folder / POSITIONED_GRAPH)


def describe_positions(folder: Path) -> tuple[PositionTable | None, Kernel | None]:
    """Return the position table of `positioned.onnx` in `folder`, and the tables for the service's fused kernel.

    Both are None without that graph. The kernel is None if it cannot compute `embeddings`.
    """
    if not (folder / POSITIONED_GRAPH).is_file():
        return None, None
    found = _find_positions(load_plain(folder), folder, max_len=1)  # the others follow, or there would be no graph
    assert found is not None
    _, table, first = found
    begin, _ = place_of(table)
    positions = PositionTable(begin=begin, rows=table.dims[0], first=first)
    tokens = tokens_of(onnx.load(folder / POSITIONED_GRAPH, load_external_data=False).graph)
    return positions, None if tokens is None else Kernel(tokens=tokens, positions=positions)


def tokens_of(graph: GraphProto) -> KernelTokens | None:
    """Return the token table of a graph with the input `position_embeddings`.

    Return None unless the graph gathers rows of one float32 table, optionally scales them, and adds the positions.
    """
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    if [node.domain or node.op_type for node in graph.node] not in (["Gather", "Add"], ["Gather", "Mul", "Add"]):
        return None
    gather, *scaling, add = graph.node
    table, vectors, scale = tensors.get(gather.input[0]), gather.output[0], 1.0
    if table is None or gather.input[1] != "input_ids" or any(entry.i for entry in gather.attribute):
        return None
    for node in scaling:
        factor = next((tensors[name] for name in node.input if name in tensors), None)
        if factor is None or factor.dims or factor.data_type != TensorProto.FLOAT or vectors not in node.input:
            return None
        vectors, scale = node.output[0], float(numpy_helper.to_array(factor))
    if {*add.input} != {vectors, POSITION_EMBEDDINGS} or add.output[0] != EMBEDDINGS:
        return None
    if table.data_type != TensorProto.FLOAT or len(table.dims) != 2 or not table.external_data:
        return None
    begin, _ = place_of(table)
    rows, width = table.dims
    summed = [value for value in (*graph.input, *graph.output) if value.name in (POSITION_EMBEDDINGS, EMBEDDINGS)]
    if begin % 4 or any(value.type.tensor_type.shape.dim[-1].dim_value != width for value in summed):
        return None  # the sum broadcasts along the width
    return KernelTokens(begin=begin, rows=rows, width=width, scale=scale)


def _find_positions(model: ModelProto, folder: Path, max_len: int | None) -> tuple[NodeProto, TensorProto, int] | None:
    """Return the Gather node of positions, its table, and the row of position 0.

    Return None unless the node reads consecutive rows for all positions, and only it depends on `offset`.
    """
    graph = model.graph
    tables = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and uses_external_data(tensor)
    }
    placed, lookup = {"offset"}, None
    values = {value.name for value in graph.input} - placed
    for node in graph.node:
        if placed.isdisjoint(node.input):
            if node.op_type != "Shape" and not values.isdisjoint(node.input):
                values.update(node.output)
        elif node.op_type == "Gather" and node.input[0] in tables and lookup is None:
            lookup = node
        elif values.isdisjoint(node.input):
            placed.update(node.output)
        else:
            return None
    first = None if lookup is None or max_len is None else _first(model, lookup, folder, max_len)
    return None if lookup is None or first is None else (lookup, tables[lookup.input[0]], first)


def _first(model: ModelProto, lookup: NodeProto, folder: Path, max_len: int) -> int | None:
    """Return the row of position 0; None if the rows of all positions are not consecutive."""
    nodes, initializers, inputs = cut(model.graph, [lookup.input[1]])
    nodes.append(make_node("Cast", [lookup.input[1]], ["rows"], to=TensorProto.INT64))
    rows = make_tensor_value_info("rows", TensorProto.INT64, None)
    graph = make_graph(nodes, "rows", inputs, [rows], initializers)
    content = make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version).SerializeToString()
    shapes = {value.name: (1,) if value.name == "offset" else (1, max_len) for value in inputs}
    feeds = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    found = Session(folder, content=content).run(feeds)["rows"].ravel()
    return int(found[0]) if np.array_equal(found, found[0] + np.arange(max_len)) else None
