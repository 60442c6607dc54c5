"""Finds the tables of the service's fused kernel in the traced graph of somebody's own module."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_graph, make_model, make_node, make_tensor_value_info

from preblock.export.external_data import place_of
from preblock.service.artifacts.manifest import Kernel, KernelTokens, PositionTable
from preblock.service.artifacts.names import EMBEDDINGS, GRAPH
from preblock.service.runtime.session import Session


def describe_kernel(folder: Path, max_len: int | None) -> Kernel | None:
    """Return the tables from which the kernel computes `embeddings` of the artifact in `folder`.

    Return None unless each vector is a row of one float32 table, optionally scaled, plus a row of another. The rows of
    all positions must be consecutive.
    """
    model = onnx.load(folder / GRAPH, load_external_data=False)
    lookup = _find_position_lookup(model.graph)
    if lookup is None or max_len is None:
        return None
    tokens = find_tokens(model.graph, lookup)
    table = next(tensor for tensor in model.graph.initializer if tensor.name == lookup.input[0])
    begin, _ = place_of(table)
    if tokens is None or table.dims[1] != tokens.width or begin % 4:
        return None
    first = _find_first_row(model, lookup, folder, max_len)
    if first is None:
        return None
    return Kernel(tokens=tokens, positions=PositionTable(begin=begin, rows=table.dims[0], first=first))


def find_tokens(graph: GraphProto, lookup: NodeProto) -> KernelTokens | None:
    """Return the token table of a graph that adds the position rows of `lookup`.

    Return None unless the other nodes gather rows of one float32 table, optionally scale them, and add the positions.
    """
    (positions,), tensors = lookup.output, {tensor.name: tensor for tensor in graph.initializer}
    placing, _, _ = cut(graph, [positions])
    nodes = [node for node in cut(graph, [EMBEDDINGS])[0] if node not in placing]
    if [node.domain or node.op_type for node in nodes] not in (["Gather", "Add"], ["Gather", "Mul", "Add"]):
        return None
    gather, *scaling, add = nodes
    table, vectors, scale = tensors.get(gather.input[0]), gather.output[0], 1.0
    if table is None or gather.input[1] != "input_ids" or not _gathers_rows(gather):
        return None
    for node in scaling:
        factor = next((tensors[name] for name in node.input if name in tensors), None)
        if factor is None or factor.dims or factor.data_type != TensorProto.FLOAT or vectors not in node.input:
            return None
        vectors, scale = node.output[0], float(numpy_helper.to_array(factor))
    if {*add.input} != {vectors, positions}:
        return None
    if table.data_type != TensorProto.FLOAT or len(table.dims) != 2 or not table.external_data:
        return None
    begin, _ = place_of(table)
    rows, width = table.dims
    (output,) = (value for value in graph.output if value.name == EMBEDDINGS)
    if begin % 4 or output.type.tensor_type.shape.dim[-1].dim_value != width:
        return None  # the sum broadcasts along the width
    return KernelTokens(begin=begin, rows=rows, width=width, scale=scale)


def _find_position_lookup(graph: GraphProto) -> NodeProto | None:
    """Return the node that gathers position rows from a float32 table in the data file.

    Return None unless it alone depends on `offset`, and on no values of other inputs.
    """
    tables = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and uses_external_data(tensor)
    }
    placed, lookup = {"offset"}, None
    values = {value.name for value in graph.input} - placed
    for node in graph.node:
        if placed.isdisjoint(node.input):
            if node.op_type != "Shape" and not values.isdisjoint(node.input):
                values.update(node.output)
        elif _gathers_rows(node) and node.input[0] in tables and lookup is None:
            lookup = node
        elif values.isdisjoint(node.input):
            placed.update(node.output)
        else:
            return None
    return lookup


def _gathers_rows(node: NodeProto) -> bool:
    """Return whether `node` is a Gather along the first axis."""
    return node.op_type == "Gather" and not any(entry.i for entry in node.attribute)


def _find_first_row(model: ModelProto, lookup: NodeProto, folder: Path, max_len: int) -> int | None:
    """Return the row of position 0; None if the rows of all positions are not consecutive."""
    nodes, initializers, inputs = cut(model.graph, [lookup.input[1]])
    nodes.append(make_node("Cast", [lookup.input[1]], ["rows"], to=TensorProto.INT64))
    rows = make_tensor_value_info("rows", TensorProto.INT64, None)
    graph = make_graph(nodes, "rows", inputs, [rows], initializers)
    content = make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version).SerializeToString()
    session, first = Session(folder, content=content), None
    calls = [(np.array([begin]), (1, max_len - begin)) for begin in sorted({0, min(1, max_len - 1), max_len // 2})]
    for offset, shape in [*calls, (np.arange(max_len), (max_len, 1))]:
        given = {value.name: offset if value.name == "offset" else np.zeros(shape, np.int64) for value in inputs}
        found = session.run(given)["rows"].ravel()
        first = int(found[0]) if first is None else first
        if not np.array_equal(found, first + offset[0] + np.arange(found.size)) or found.size != max(shape):
            return None
    return first


def cut(graph: GraphProto, outputs: Collection[str]) -> tuple[list[NodeProto], list[TensorProto], list[ValueInfoProto]]:
    """Return the nodes, the initializers and the inputs needed to compute the values `outputs`."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(_inputs(node))
            nodes.append(node)
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    return nodes[::-1], initializers, [value for value in graph.input if value.name in needed]


def _inputs(node: NodeProto) -> Iterator[str]:
    """Yield the names of all inputs of `node`, including the outer values used by its subgraphs."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _inputs(inner)
