"""Reads from a graph what it adds positions to, where that is no more than rows of a table."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from preblock.service.artifacts.manifest import EMBEDDINGS, POSITION_EMBEDDINGS, POSITIONED_GRAPH
from preblock.service.artifacts.onnx_check import MOST_BYTES, parse, tables
from preblock.service.artifacts.onnx_subset_pb2 import TensorProto
from preblock.service.core.files import read_file

FLOAT = 1
"""The ONNX data type."""


class Summand(NamedTuple):
    """Rows of a float32 table of such a shape, which begins at byte `begin` of the data file, each times `scale`."""

    begin: int
    shape: tuple[int, int]
    scale: float


def summand_of(folder: Path) -> Summand | None:
    """Return what `positioned.onnx` in `folder` adds positions to, which was checked; None where it is no such rows."""
    graph = parse(POSITIONED_GRAPH, read_file(folder / POSITIONED_GRAPH, MOST_BYTES)).graph
    nodes, found = list(graph.node), tables(graph, "input_ids")
    kinds = [node.domain or node.op_type for node in nodes]
    if kinds not in (["Gather", "Add"], ["Gather", "Mul", "Add"]) or len(found) != 1:
        return None
    (table,), (gather, *scaling, add) = found, nodes
    vectors, scale = gather.output[0], 1.0
    factors = {tensor.name: _number(tensor) for tensor in graph.initializer if not tensor.dims}
    for node in scaling:
        factor = next((factors[name] for name in node.input if name in factors), None)
        if factor is None or vectors not in node.input:
            return None
        vectors, scale = node.output[0], factor
    if {*add.input} != {vectors, POSITION_EMBEDDINGS} or add.output[0] != EMBEDDINGS:
        return None
    if table.data_type != FLOAT or len(table.dims) != 2 or table.data_location != TensorProto.EXTERNAL:
        return None
    begin = next(int(entry.value) for entry in table.external_data if entry.key == "offset")
    return None if begin % 4 else Summand(begin, (table.dims[0], table.dims[1]), scale)


def _number(tensor: TensorProto) -> float | None:
    """Return the one value of a float32 tensor; None of any other."""
    if tensor.data_type != FLOAT:
        return None
    return float(np.frombuffer(tensor.raw_data, "<f4")[0]) if tensor.raw_data else tensor.float_data[0]
