"""The graph of a bare lookup: its vectors are rows of one table."""

from pathlib import Path
from typing import NamedTuple

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES, TYPES, parse, tables
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
