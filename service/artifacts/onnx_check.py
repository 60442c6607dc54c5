"""Check the graphs of an artifact before onnxruntime opens them: their tensors, and their agreement with the manifest.

onnxruntime rejects some errors itself. This check bounds its file mappings and its memory beforehand.
"""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from preblock.service.artifacts.manifest import Artifact, Manifest, NgramTable
from preblock.service.artifacts.names import DATA, MANIFEST, NGRAM_IDS_GRAPH, NGRAMS_GRAPH
from preblock.service.artifacts.onnx_subset_pb2 import GraphProto, ModelProto, SparseTensorProto, TensorProto
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import read_file

MAX_GRAPH_BYTES = 16 * 2**20
"""Limit of a graph without weights: a hundred times the largest known front-end."""
MAX_DIMENSIONS = 32

TYPES = {
    1: ("float32", 4, "float_data"),
    2: ("uint8", 1, "int32_data"),
    3: ("int8", 1, "int32_data"),
    4: ("uint16", 2, "int32_data"),
    5: ("int16", 2, "int32_data"),
    6: ("int32", 4, "int32_data"),
    7: ("int64", 8, "int64_data"),
    9: ("bool", 1, "int32_data"),
    10: ("float16", 2, "int32_data"),
    11: ("float64", 8, "double_data"),
    12: ("uint32", 4, "uint64_data"),
    13: ("uint64", 8, "uint64_data"),
    16: ("bfloat16", 2, "int32_data"),
}
"""Supported ONNX data types: name, bytes of an element, and the field with single elements."""

OPERATORS = frozenset(
    (
        *("Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil"),
        *("Clip", "Concat", "Constant", "ConstantOfShape", "Conv", "Cos", "CumSum", "DequantizeLinear", "Div"),
        *("Equal", "Exp", "Expand", "Floor", "Gather", "Gelu", "Greater", "GreaterOrEqual", "Identity"),
        *("LayerNormalization", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not"),
        *("Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceSum", "Reshape", "Round", "Shape"),
        *("Sin", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
    )
)
"""Operators of the graphs that an export writes. The graph of somebody's own module may hold any, but no loop."""

Extent = tuple[int, int]
"""Offset and end of a tensor in the data file."""


def check_graphs(folder: Path, manifest: Artifact) -> None:
    """Check every graph of the artifact in `folder`.

    Raises:
        ArtifactError: a file is not an ONNX model, or holds control flow or an unknown operator; a tensor lies outside
            the data file and its graph, overlaps another tensor, or has a wrong length for its dtype and
            shape; or the manifest disagrees with a table.

    """
    lengths = {name: file.bytes for name, file in manifest.files.items()}
    if missing := {DATA, *manifest.graphs} - lengths.keys():
        lacking = ", ".join(sorted(missing))
        message = f"{MANIFEST} files does not list {lacking}"
        raise ArtifactError(f"{MANIFEST} files", ", ".join(lengths), f"also {lacking}", message=message)
    everywhere: dict[Extent, str] = {}
    for graph in manifest.graphs:
        model = parse(graph, read_file(folder / graph, MAX_GRAPH_BYTES))
        _check_operators(graph, model, own_module=manifest.front_end is None)
        here: dict[Extent, str] = {}
        for tensor in _tensors(graph, model):
            field = f"{graph} {_printable(tensor.name)}"
            extent = _check_tensor(field, tensor, lengths[DATA])
            if extent is None:
                continue
            if extent in here:
                message = f"{field} has the bytes of {here[extent]}, expected bytes of its own"
                raise ArtifactError(field, f"the bytes of {here[extent]}", "bytes of its own", message=message)
            here[extent] = field
        everywhere = here | everywhere  # two graphs may share a tensor
        if isinstance(manifest, Manifest):
            _check_tables(graph, model.graph, manifest)
    for ((_, end), before), ((begin, _), after) in pairwise(sorted(everywhere.items())):
        if begin < end:
            message = f"{after} begins at offset {begin}, within {before}"
            raise ArtifactError(after, f"offset {begin}, within {before}", "bytes of its own", message=message)


def parse(graph: str, content: bytes) -> ModelProto:
    """Return the content of the file `graph`; raise ArtifactError for another format than ONNX."""
    try:
        model = ModelProto.FromString(content)
    except DecodeError as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(graph, reason, "an ONNX model", message=f"{graph} is no ONNX model: {reason}") from error
    if not model.HasField("graph"):
        raise ArtifactError(graph, "no graph", "an ONNX model", message=f"{graph} is no ONNX model: it has no graph")
    return model


def _check_operators(graph: str, model: ModelProto, own_module: bool) -> None:
    """Refuse loops: onnxruntime runs a constant one while it opens the graph, and cannot be stopped."""
    if model.functions or model.training_info:
        raise ArtifactError(graph, "functions, or graphs for training", "one graph of operators")
    nodes = [*model.graph.node]
    while nodes:
        node = nodes.pop()
        field = f"{graph} node {_printable(node.op_type)}"
        has_subgraph = any(entry.HasField("g") or entry.graphs for entry in node.attribute)
        if has_subgraph and not (own_module and node.op_type == "If"):
            raise ArtifactError(field, "a subgraph", "an operator without one; If in the graph of an own module")
        if not own_module and (node.domain or node.op_type not in OPERATORS):
            raise ArtifactError(field, "an operator that no export writes", ", ".join(sorted(OPERATORS)))
        nodes += [child for entry in node.attribute for part in (entry.g, *entry.graphs) for child in part.node]


def _tensors(graph: str, message: Message) -> Iterator[TensorProto]:
    """Yield every tensor in `message` at any depth: subgraphs, attributes, functions."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if isinstance(value, Message) else value:
            if isinstance(part, TensorProto):
                yield part
            elif isinstance(part, SparseTensorProto):
                # A few bytes can declare any shape, and onnxruntime expands it before use.
                raise ArtifactError(f"{graph} {_printable(part.values.name)}", "a sparse tensor", "a dense one")
            else:
                yield from _tensors(graph, part)


def _check_tensor(field: str, tensor: TensorProto, data_bytes: int) -> Extent | None:
    """Return the extent of `tensor` in the data file; None for a tensor in the graph, or without elements."""
    if tensor.data_type not in TYPES:
        allowed = ", ".join(f"{number} ({name})" for number, (name, _, _) in TYPES.items())
        raise ArtifactError(f"{field} data_type", tensor.data_type, allowed)
    dtype, width, elements = TYPES[tensor.data_type]
    dims = tensor.dims
    if len(dims) > MAX_DIMENSIONS:
        raise ArtifactError(f"{field} dims", f"{len(dims)} of them", f"at most {MAX_DIMENSIONS}")
    if any(size < 0 for size in dims):
        raise ArtifactError(f"{field} dims", list(dims), "sizes of 0 or more")
    needed = math.prod(dims) * width
    allowed = f"{needed} bytes, as {dtype} {list(dims)} has"
    inside = len(tensor.raw_data) if tensor.HasField("raw_data") else len(getattr(tensor, elements)) * width
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    texts: list[object] = [text for entry in entries for text in entry]
    if not all(isinstance(text, str) for text in texts):  # protobuf returns invalid UTF-8 as bytes
        raise ArtifactError(f"{field} external_data", "bytes that are no UTF-8", "text")
    if tensor.HasField("segment"):
        raise ArtifactError(field, "a segment", "a whole tensor")
    if tensor.data_location != TensorProto.EXTERNAL:
        if entries:
            raise ArtifactError(f"{field} data_location", "DEFAULT", "EXTERNAL, since it has external_data")
        if inside != needed:
            raise ArtifactError(field, f"{inside} bytes", allowed)
        return None
    if inside:
        raise ArtifactError(f"{field} data_location", "EXTERNAL", f"DEFAULT, since it holds {inside} bytes")
    if sorted(key for key, _ in entries) != ["length", "location", "offset"]:
        keys = ", ".join(_printable(key) for key, _ in entries) or "nothing"
        raise ArtifactError(f"{field} external_data", keys, "location, offset and length, once each")
    external = dict(entries)
    if external["location"] != DATA:
        raise ArtifactError(f"{field} location", _printable(external["location"]), f"{DATA}, in the same folder")
    offset, length = (_number(f"{field} {key}", external[key]) for key in ("offset", "length"))
    if length != needed:
        raise ArtifactError(f"{field} length", length, allowed)
    if offset + length > data_bytes:
        raise ArtifactError(field, f"bytes {offset} to {offset + length}", f"0 to {data_bytes}, as {DATA} has")
    return (offset, offset + length) if length else None


def _check_tables(name: str, graph: GraphProto, manifest: Manifest) -> None:
    """Compare the rows and the type of the tables with the indices and the dtype of the manifest."""
    for index, limit in {"input_ids": manifest.vocab_size, **manifest.indices}.items():
        rows = {table.name: table.dims[0] for table in tables(graph, index)}
        if not rows:
            continue
        smallest = min(rows, key=rows.__getitem__)
        # A custom module may have unused rows.
        if rows[smallest] < limit or (rows[smallest] > limit and manifest.front_end is not None):
            field = f"{MANIFEST} {'vocab_size' if index == 'input_ids' else f'indices.{index}'}"
            raise ArtifactError(field, limit, f"{rows[smallest]}, the rows of {name} {_printable(smallest)}")
    stored = {"int4": "uint8"}.get(manifest.dtype, manifest.dtype)  # two numbers in a byte
    # Further tables of token rows are scales.
    for table in tables(graph, "input_ids")[:1] if manifest.front_end is not None else ():
        dtype = TYPES[table.data_type][0]
        if dtype != stored:
            raise ArtifactError(
                f"{MANIFEST} dtype", manifest.dtype, f"{dtype}, the type of {name} {_printable(table.name)}"
            )


def tables(graph: GraphProto, index: str) -> list[TensorProto]:
    """Return the tables with rows gathered by the input `index` of `graph`."""
    tensors = {tensor.name: tensor for tensor in graph.initializer if tensor.dims}
    return [
        tensors[node.input[0]]
        for node in graph.node
        if node.op_type == "Gather" and len(node.input) == 2 and node.input[1] == index
        if node.input[0] in tensors and not any(entry.i for entry in node.attribute if entry.name == "axis")
    ]


def _number(field: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ArtifactError(field, _printable(text), "a whole number of bytes")
    return int(text)


def _printable(text: str) -> str:
    return ascii(text[:120])[1:-1]


def check_ngram_tables(folder: Path, manifest: Artifact) -> None:
    """Compare the `ngram_tables` of the artifact in `folder` with its graphs, after `check_graphs`.

    Raises:
        ArtifactError: a layer has no table, or its table is none of `ngrams.onnx`; or a table lies in another file.

    """
    if not isinstance(manifest, Manifest) or not manifest.ngram_tables:
        return
    outputs = manifest.graphs[NGRAM_IDS_GRAPH].outputs if NGRAM_IDS_GRAPH in manifest.graphs else ()
    layers = outputs[0].shape[2:3] if outputs else ()
    if layers != (len(manifest.ngram_tables),):
        count = layers[0] if layers else 0
        raise ArtifactError(
            f"{MANIFEST} ngram_tables", len(manifest.ngram_tables), f"{count}, as {NGRAM_IDS_GRAPH} has"
        )
    if manifest.references:
        return  # `check_references` compares the tables with those files
    places = _find_places(folder) if NGRAMS_GRAPH in manifest.graphs else set()
    for number, table in enumerate(manifest.ngram_tables):
        field = f"{MANIFEST} ngram_tables.{number}"
        parts = [(part.file, part.rows, part.scales) for part in table.parts]
        if parts != [(DATA, table.rows, None)]:
            raise ArtifactError(f"{field}.parts", table.parts, f"one part of {table.rows} rows in {DATA}")
        if (table.parts[0].begin, table.rows, table.width, table.dtype) not in places:
            raise ArtifactError(field, _describe(table), f"a table of {NGRAMS_GRAPH}")


def _find_places(folder: Path) -> set[tuple[int, int, int, str]]:
    """Return begin, rows, width and type of each table of `ngrams.onnx` in the data file."""
    places = set()
    for tensor in parse(NGRAMS_GRAPH, read_file(folder / NGRAMS_GRAPH, MAX_GRAPH_BYTES)).graph.initializer:
        begins = [int(entry.value) for entry in tensor.external_data if entry.key == "offset"]
        if begins and len(tensor.dims) == 2:
            places.add((begins[0], tensor.dims[0], tensor.dims[1], TYPES[tensor.data_type][0]))
    return places


def _describe(table: NgramTable) -> str:
    return f"{table.rows} rows of {table.width} {table.dtype} from byte {table.parts[0].begin}"
