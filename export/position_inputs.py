"""Writes a graph with position embeddings as an input, in place of a lookup.

Rows with one offset have consecutive positions, and their vectors are consecutive in the table. A call passes a view
of the table, without the copy made by the lookup of the plain graph.

Letters: B batch, L length, P width of a table of positions.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_graph, make_model, make_tensor_value_info
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_shapes

from preblock.export.graph import load_plain, save_graph
from preblock.service.artifacts.manifest import (
    EMBEDDINGS,
    POSITION_EMBEDDINGS,
    POSITIONED_GRAPH,
    SUMMAND,
    PositionTable,
)


def write_positioned(folder: Path) -> None:
    """Write `positioned.onnx` into `folder`, over the same data file as the other graphs.

    Its input `position_embeddings`, float32 (B or 1, L, P), replaces `offset`. The graph is written only if positions
    are consecutive rows of a float32 table, and depend neither on ids nor on a mask.

    If the last step adds positions, the sum before it is a second output, `summand`. A caller can then bind both
    outputs to the same memory.
    """
    model = load_plain(folder)
    graph, lookup = model.graph, _lookup(model)
    if lookup is None:
        return
    width = _tensor(graph, lookup.input[0]).dims[1]
    shapes = {value.name: _shape(value) for value in infer_shapes(model).graph.value_info}
    wanted, placed = {EMBEDDINGS}, lookup.output[0]
    lookup.output[0] = "nowhere"
    kept = _needed(graph, wanted)
    for node in kept:
        node.input[:] = [POSITION_EMBEDDINGS if name == placed else name for name in node.input]
    outputs = [*graph.output, *_summand(graph.output[0], kept, shapes, width)]
    given = make_tensor_value_info(POSITION_EMBEDDINGS, TensorProto.FLOAT, ["positions", "length", width])
    inputs = [value for value in graph.input if value.name in wanted]
    tensors = [tensor for tensor in graph.initializer if tensor.name in wanted]
    for field, values in (
        ("node", kept),
        ("input", [*inputs, given]),
        ("output", outputs),
        ("initializer", tensors),
        ("value_info", []),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    save_graph(model, folder / POSITIONED_GRAPH)


def _summand(
    embeddings: ValueInfoProto, nodes: list[NodeProto], shapes: Mapping[str, list[object]], width: int
) -> list[ValueInfoProto]:
    """Rename the tensor to which the last node adds positions, and return it as an output like `embeddings`.

    Return nothing if the last node is another operation, or broadcasts either tensor.
    """
    last, shape = nodes[-1], _shape(embeddings)
    computed = {name for node in nodes for name in node.output if shapes.get(name) == shape}
    summands = [name for name in last.input if name in computed]
    if last.op_type != "Add" or len(summands) != 1 or POSITION_EMBEDDINGS not in last.input or shape[-1] != width:
        return []
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [SUMMAND if name == summands[0] else name for name in names]
    output = ValueInfoProto()
    output.CopyFrom(embeddings)
    output.name = SUMMAND
    return [output]


def _shape(value: ValueInfoProto) -> list[object]:
    """Return the sizes of the axes, and the names of dynamic axes."""
    return [dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim]


def positions_of(folder: Path) -> PositionTable:
    """Return the place of the position table in the data file."""
    model = load_plain(folder)
    lookup = _lookup(model)
    assert lookup is not None
    table = _tensor(model.graph, lookup.input[0])
    begin = next(int(entry.value) for entry in table.external_data if entry.key == "offset")
    return PositionTable(begin=begin, rows=table.dims[0], first=_first(model.graph, lookup))


def _tensor(graph: GraphProto, name: str) -> TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def _needed(graph: GraphProto, wanted: set[str]) -> list[NodeProto]:
    """Return the nodes to compute `wanted`, and add their inputs to `wanted`."""
    nodes: list[NodeProto] = []
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(node.input)
            nodes.insert(0, node)
    return nodes


def _lookup(model: onnx.ModelProto) -> NodeProto | None:
    """Return the Gather node of positions.

    Return None unless it gathers consecutive rows, and all other nodes are independent of offsets.
    """
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
    """Return the row of position 0; -1 if positions 1 and 2 do not follow it."""
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
