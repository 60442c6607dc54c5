"""The graph of position rows: the part of a plain graph for the vectors added to the token rows."""

from pathlib import Path

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES, parse
from preblock.service.artifacts.onnx_subset_pb2 import GraphProto, ValueInfoProto
from preblock.service.core.files import read_file


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
