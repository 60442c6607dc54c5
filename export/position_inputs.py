"""Writes a graph of the same vectors that is given those of positions, so that it need not look them up.

The positions of rows with one offset follow one another: their vectors lie in the table as they are needed, and a view
of it is all that a call takes. The plain graph copies them first.

Letters: B batch, L length, P width of a table of positions.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_graph, make_model, make_tensor_value_info
from onnx.reference import ReferenceEvaluator

from preblock.export.graph import load_plain, save_graph
from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, POSITIONED_GRAPH
from preblock.service.artifacts.records import PositionTable


def write_positioned(folder: Path) -> None:
    """Write `positioned.onnx` into `folder`, beside the graph that gives `embeddings` alone, over the same data file.

    In place of `offset` it takes `position_embeddings`, float32 (B or 1, L, P), which that graph looks up. A front-end
    has none whose positions depend on ids or on a mask, or are no rows of a float32 table, one after another.
    """
    model = load_plain(folder)
    graph, lookup = model.graph, _lookup(model)
    if lookup is None:
        return
    width = _tensor(graph, lookup.input[0]).dims[1]
    wanted, placed = {EMBEDDINGS}, lookup.output[0]
    lookup.output[0] = "nowhere"
    kept = _needed(graph, wanted)
    for node in kept:
        node.input[:] = [POSITION_EMBEDDINGS if name == placed else name for name in node.input]
    given = make_tensor_value_info(POSITION_EMBEDDINGS, TensorProto.FLOAT, ["positions", "length", width])
    inputs = [value for value in graph.input if value.name in wanted]
    tensors = [tensor for tensor in graph.initializer if tensor.name in wanted]
    for field, values in (
        ("node", kept),
        ("input", [*inputs, given]),
        ("initializer", tensors),
        ("value_info", []),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    save_graph(model, folder / POSITIONED_GRAPH)


def positions_of(folder: Path) -> PositionTable:
    """Return where the table lies whose rows `positioned.onnx` is given."""
    model = load_plain(folder)
    lookup = _lookup(model)
    assert lookup is not None
    table = _tensor(model.graph, lookup.input[0])
    begin = next(int(entry.value) for entry in table.external_data if entry.key == "offset")
    return PositionTable(begin=begin, rows=table.dims[0], first=_first(model.graph, lookup))


def _tensor(graph: GraphProto, name: str) -> TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def _needed(graph: GraphProto, wanted: set[str]) -> list[NodeProto]:
    """Return the nodes that give `wanted`, to which what those need is added."""
    nodes: list[NodeProto] = []
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(node.input)
            nodes.insert(0, node)
    return nodes


def _lookup(model: onnx.ModelProto) -> NodeProto | None:
    """Return what looks positions up; None where that is no Gather of following rows that alone depends on offsets."""
    graph, placed = model.graph, {"offset"}
    tables = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and uses_external_data(tensor)
    }
    told, found = {value.name for value in graph.input} - placed, None
    for node in graph.node:
        if placed.isdisjoint(node.input):
            if node.op_type != "Shape" and not told.isdisjoint(node.input):
                told.update(node.output)
        elif node.op_type == "Gather" and node.input[0] in tables and found is None:
            found = node
        elif told.isdisjoint(node.input):
            placed.update(node.output)
        else:
            return None
    return found if found is not None and _first(graph, found) >= 0 else None


def _first(graph: GraphProto, lookup: NodeProto) -> int:
    """Return the row of position 0; -1 where others do not follow it."""
    wanted = {lookup.input[1]}
    nodes = _needed(graph, wanted)
    rows = make_tensor_value_info(lookup.input[1], TensorProto.INT64, None)
    tensors = [tensor for tensor in graph.initializer if tensor.name in wanted]
    index = ReferenceEvaluator(make_model(make_graph(nodes, "rows", list(graph.input), [rows], tensors)))
    shapes = {value.name: (1,) if value.name == "offset" else (1, 3) for value in graph.input}
    found = index.run(None, {name: np.zeros(shape, np.int64) for name, shape in shapes.items()})
    assert isinstance(found, list)
    first, *following = found[0].ravel().tolist()
    return first if following == [first + 1, first + 2] else -1
