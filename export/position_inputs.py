"""Writes `positioned.onnx`, a graph with an input for position embeddings in place of their lookup.

If all rows have one offset, their position embeddings are consecutive rows of the table. A call then passes a view of
the table, while the plain graph copies the rows first.

Letters: B batch, L length, P width of a table of positions.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_graph, make_model, make_tensor_value_info
from onnx.reference import ReferenceEvaluator

from preblock.export.external_data import place_of
from preblock.export.graph import cut, load_plain, replace_fields, save_graph
from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, POSITIONED_GRAPH
from preblock.service.artifacts.records import PositionTable


def write_positioned(folder: Path) -> None:
    """Write `positioned.onnx` into `folder`, over the data file of the graph of `embeddings`.

    Its input `position_embeddings`, float32 (B or 1, L, P), replaces `offset`. No file is written unless positions are
    consecutive rows of a float32 table, independent of ids and mask.
    """
    model = load_plain(folder)
    graph, lookup = model.graph, _lookup(model)
    if lookup is None:
        return
    width = _tensor(graph, lookup.input[0]).dims[1]
    positions = lookup.output[0]
    lookup.output[0] = "unused"
    nodes, initializers, inputs = cut(graph, [EMBEDDINGS])
    for node in nodes:
        node.input[:] = [POSITION_EMBEDDINGS if name == positions else name for name in node.input]
    given = make_tensor_value_info(POSITION_EMBEDDINGS, TensorProto.FLOAT, ["positions", "length", width])
    replace_fields(graph, node=nodes, input=[*inputs, given], initializer=initializers, value_info=[])
    save_graph(model, folder / POSITIONED_GRAPH)


def positions_of(folder: Path) -> PositionTable:
    """Return the place of the position table in the data file."""
    model = load_plain(folder)
    lookup = _lookup(model)
    assert lookup is not None
    table = _tensor(model.graph, lookup.input[0])
    begin, _ = place_of(table)
    return PositionTable(begin=begin, rows=table.dims[0], first=_first(model.graph, lookup))


def _tensor(graph: GraphProto, name: str) -> TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def _lookup(model: onnx.ModelProto) -> NodeProto | None:
    """Return the Gather node of positions; None unless it reads consecutive rows and alone depends on `offset`."""
    graph, placed = model.graph, {"offset"}
    tables = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and uses_external_data(tensor)
    }
    values, found = {value.name for value in graph.input} - placed, None
    for node in graph.node:
        if placed.isdisjoint(node.input):
            if node.op_type != "Shape" and not values.isdisjoint(node.input):
                values.update(node.output)
        elif node.op_type == "Gather" and node.input[0] in tables and found is None:
            found = node
        elif values.isdisjoint(node.input):
            placed.update(node.output)
        else:
            return None
    return found if found is not None and _first(graph, found) >= 0 else None


def _first(graph: GraphProto, lookup: NodeProto) -> int:
    """Return the row of position 0; -1 if the rows of positions 0, 1 and 2 are not consecutive."""
    nodes, initializers, _ = cut(graph, [lookup.input[1]])
    rows = make_tensor_value_info(lookup.input[1], TensorProto.INT64, None)
    index = ReferenceEvaluator(make_model(make_graph(nodes, "rows", list(graph.input), [rows], initializers)))
    shapes = {value.name: (1,) if value.name == "offset" else (1, 3) for value in graph.input}
    found = index.run(None, {name: np.zeros(shape, np.int64) for name, shape in shapes.items()})
    assert isinstance(found, list)
    first, *following = found[0].ravel().tolist()
    return first if following == [first + 1, first + 2] else -1
