"""Finds the tables for the fused kernel of the service, which adds a token row and a position row."""

from pathlib import Path

import onnx
from onnx import GraphProto, TensorProto, numpy_helper

from preblock.export.external_data import place_of
from preblock.export.position_inputs import positions_of
from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, POSITIONED_GRAPH
from preblock.service.artifacts.records import Kernel, KernelTokens


def kernel_of(folder: Path) -> Kernel | None:
    """Return the kernel's tables in `positioned.onnx` of `folder`; None if the kernel cannot compute `embeddings`."""
    graph = onnx.load(folder / POSITIONED_GRAPH, load_external_data=False).graph
    tokens = tokens_of(graph)
    return None if tokens is None else Kernel(tokens=tokens, positions=positions_of(folder))


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
