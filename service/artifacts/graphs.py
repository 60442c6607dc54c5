"""Contents of an artifact's graphs: the table of a bare lookup, the nodes of position rows, and trained parameters."""

import math
from pathlib import Path
from typing import NamedTuple

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import DATA, EMBEDDINGS
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES, TYPES, parse, tables
from preblock.service.artifacts.onnx_subset_pb2 import GraphProto, ValueInfoProto
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.files import read_file


class TablePlace(NamedTuple):
    """The place of a table in the data file: its first byte, and its rows of `width` numbers, float32."""

    begin: int
    rows: int
    width: int


def find_lookup(folder: Path, manifest: Manifest) -> TablePlace | None:
    """Return the table of the artifact in `folder`, after `check_graphs`; None if `embeddings` are not its rows."""
    graph = parse(manifest.plain, read_file(folder / manifest.plain, MAX_GRAPH_BYTES)).graph
    for place in reversed(range(len(graph.node))):
        if EMBEDDINGS not in graph.node[place].output or graph.node[place].domain:
            del graph.node[place]
    for table in tables(graph, "input_ids"):
        fields = {entry.key: entry.value for entry in table.external_data}
        stored = TYPES[table.data_type][0] == "float32" and len(table.dims) == 2 and "offset" in fields
        if stored and int(fields["offset"]) % 4 == 0:
            return TablePlace(int(fields["offset"]), *table.dims)
    return None


def build_position_graph(folder: Path, manifest: Manifest) -> bytes | None:
    """Return the plain graph of the artifact in `folder` as ONNX, with the position rows as its only output.

    The output is float32 (1 or batch, length, P). Return None if the graph adds no vectors of `offset` to the token
    rows, as with rotary attention alone.
    """
    model = parse(manifest.plain, read_file(folder / manifest.plain, MAX_GRAPH_BYTES))
    rows = _find_position_rows(model.graph)
    if rows is None:
        return None
    # onnxruntime resolves links, so it needs the name of the data file itself, such as a blob of a hub cache.
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = (folder / DATA).resolve().name
    # onnxruntime infers the type, and drops unused nodes.
    model.graph.ClearField("output")
    model.graph.output.append(ValueInfoProto(name=rows))
    return model.SerializeToString()


def _find_position_rows(graph: GraphProto) -> str | None:
    """Return the name of the first value of `offset` in a sum with values looked up by token ids."""
    tables = {tensor.name for tensor in graph.initializer if tensor.dims}
    ids = {"input_ids"}  # reshaped ones, too
    looked_up: set[str] = set()
    placed = {"offset"}
    for node in graph.node:
        gathers_tokens = node.op_type == "Gather" and node.input[0] in tables and node.input[1] in ids
        from_tokens = gathers_tokens or not looked_up.isdisjoint(node.input)
        from_offset = not placed.isdisjoint(node.input)
        if node.op_type == "Add" and from_tokens and from_offset:
            return next(name for name in node.input if name in placed)
        if from_tokens:
            looked_up.update(node.output)
        if node.op_type == "Reshape" and node.input[0] in ids:
            ids.update(node.output)
        if from_offset:
            placed.update(node.output)
    return None


WEIGHT_TYPES = ("float32", "float16", "bfloat16", "int8", "uint8")
"""Types of stored weights."""


def count_parameters(folder: Path, manifest: Manifest | StemManifest, report: ParityReport) -> dict[str, int]:
    """Return the number of trained values of each weight, read from the graphs; computed tables are not trained."""
    counts = {}
    for graph in manifest.graphs:
        for tensor in parse(graph, read_file(folder / graph, MAX_GRAPH_BYTES)).graph.initializer:
            dtype = TYPES[tensor.data_type][0]
            # Without a front-end of steps the names are free.
            trained = tensor.name.endswith(("weight", "bias")) or manifest.kind == "stem" or manifest.front_end is None
            if tensor.dims and dtype in WEIGHT_TYPES and trained:
                counts[tensor.name] = math.prod(tensor.dims)
    if isinstance(manifest, Manifest) and manifest.references:
        counts |= {f"ngrams.tables.{n}.weight": t.rows * t.width for n, t in enumerate(manifest.ngram_tables)}
    # The rows of an int4 table are packed and padded.
    return counts | {name: table.rows * table.width for name, table in report.storage.items()}
