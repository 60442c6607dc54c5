"""Writes a graph of the same vectors that computes a tile of tokens at a time, so that what is between stays in cache.

The plain graph computes each step for all tokens before the next, and a large call goes through memory for every one.

Letters: B batch, L length, D output width.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
from onnx import GraphProto, NodeProto, TensorProto
from onnx.helper import make_graph, make_node, make_tensor_value_info

from preblock.export.graph import load_plain, save_graph
from preblock.service.artifacts.manifest import EMBEDDINGS, TILES_GRAPH, Tiles

LAST = {"Add", "Mul", "Cast", "LayerNormalization"}
"""Last nodes of a graph that do to a matrix what they do to a stack of matrices."""
PRODUCTS = {"MatMul", "Gemm"}
"""Nodes that take far longer than memory does, and whose bits may depend on how many rows there are."""
RANKS = {"token.offset": 1}
"""Of slices that are no matrix."""
VALUES = 2**18
"""Of the vectors of a tile: one MiB, which stays in the cache of a core or near it."""
LEAST = 8
"""Tiles of the smallest call that gains: four gain nothing, and lose with two threads."""


def write_tiles(folder: Path) -> None:
    """Write `tiles.onnx` into `folder`, beside the graph that gives `embeddings` alone and over the same data file.

    Its inputs and its output are the same, but `offset` is (1,) or (batch * length,): of every row, or of every token,
    each of which is then a row of its own. It takes no batch of 0. A front-end that gains nothing from it has none: one
    that only looks vectors up, or that has a projection; nor has one that ends in a sum of int8 with one scale.
    """
    model = load_plain(folder)
    stacks = _stacks(model)
    if stacks is None:
        return
    rows, tokens = _over_rows(model.graph, stacks), _over_tokens(model.graph, stacks)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(
        [
            make_node("Size", ["offset"], ["offsets"]),
            make_node("Constant", [], ["single"], value_int=1),
            make_node("Equal", ["offsets", "single"], ["one_offset"]),
            make_node("If", ["one_offset"], [EMBEDDINGS], then_branch=rows, else_branch=tokens),
        ]
    )
    save_graph(model, folder / TILES_GRAPH)


def tiles_of(width: int) -> Tiles:
    """Return which calls the graph of tiles serves whose vectors are `width` wide."""
    size = min(2 ** max(0, (VALUES // width).bit_length() - 1), 2**16)
    return Tiles(size=size, least=LEAST * size)


def _stacks(model: onnx.ModelProto) -> list[str] | None:
    """Return which inputs of the last node of `model` are (batch, length, …); None where it cannot be tiled."""
    graph, last = model.graph, model.graph.node[-1]
    nested = any(attribute.HasField("g") for node in graph.node for attribute in node.attribute)
    if nested or last.op_type not in LAST or not PRODUCTS.isdisjoint(node.op_type for node in graph.node):
        return None
    if any(node.op_type == "DequantizeLinear" and {*node.output} & {*last.input} for node in graph.node):
        return None  # onnxruntime 1.31 aborts where a Squeeze follows one that has no zero point
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    stacks = {value.name for value in inferred if len(value.type.tensor_type.shape.dim) == 3}
    flat = {tensor.name for tensor in graph.initializer if len(tensor.dims) < 2}
    return [name for name in dict.fromkeys(last.input) if name in stacks] if stacks | flat >= {*last.input} else None


def _over_rows(graph: GraphProto, stacks: Collection[str]) -> GraphProto:
    """Return a loop over the rows of a batch with one offset; what depends on no id is computed before it, once."""
    inputs = [value.name for value in graph.input if value.name != "offset"]
    told, before, inside = set(inputs), [], []
    for node in graph.node:
        if told.isdisjoint(node.input) or (node.op_type == "Shape" and {*node.input} <= {*inputs}):
            before.append(node)
        else:
            inside.append(node)
            told.update(node.output)
    names = {name: f"row.{name}" for node in graph.node for name in node.output}
    first = {name: f"first.{name}" for name in inputs if any(name in node.input for node in before)}
    flat = {name: f"row.flat.{name}" for name in stacks}
    outer = [
        make_node("Constant", [], ["zero"], value_ints=[0]),
        make_node("Constant", [], ["one"], value_ints=[1]),
        *(make_node("Slice", [name, "zero", "one", "zero"], [part]) for name, part in first.items()),
        *(_renamed(node, names | first) for node in before),
        *(make_node("Squeeze", [names[name], "zero"], [flat[name]]) for name in stacks if name not in told),
        *(make_node("Unsqueeze", [name, "one"], [f"rows.{name}"]) for name in inputs),
    ]
    names |= {name: f"row.{name}" for name in inputs}
    body = [
        *(_renamed(node, names) for node in inside[:-1]),
        *(make_node("Squeeze", [names[name], "zero"], [flat[name]]) for name in stacks if name in told),
        _renamed(inside[-1], names | flat),
    ]
    return _loop(graph, outer, body, {f"rows.{name}": f"row.{name}" for name in inputs}, names[EMBEDDINGS])


def _over_tokens(graph: GraphProto, stacks: Collection[str]) -> GraphProto:
    """Return a loop over tiles of tokens, each a row of length 1 with an offset of its own."""
    inputs = [value.name for value in graph.input]
    names = {name: f"token.{name}" for name in [*inputs, *(name for node in graph.node for name in node.output)]}
    flat = {name: f"token.flat.{name}" for name in stacks}
    outer = [
        make_node("Constant", [], ["one"], value_ints=[1]),
        make_node("Constant", [], ["two"], value_ints=[2]),
        make_node("Shape", ["input_ids"], ["tiles"]),
        *(
            make_node("Reshape", [name, "tiles"], [f"tiles.{name}"])
            if name == "offset"
            else make_node("Unsqueeze", [name, "two"], [f"tiles.{name}"])
            for name in inputs
        ),
    ]
    body = [
        *(_renamed(node, names) for node in list(graph.node)[:-1]),
        *(make_node("Squeeze", [names[name], "one"], [flat[name]]) for name in stacks),
        _renamed(graph.node[-1], names | flat),
    ]
    return _loop(graph, outer, body, {f"tiles.{name}": names[name] for name in inputs}, names[EMBEDDINGS])


def _loop(
    graph: GraphProto, outer: list[NodeProto], body: list[NodeProto], slices: Mapping[str, str], vectors: str
) -> GraphProto:
    """Return the nodes `outer` and a loop of `body` after them.

    Args:
        graph: the plain one.
        outer: nodes before the loop.
        body: nodes of the loop.
        slices: what is sliced, one tile from each -> its slice in `body`.
        vectors: the last output of `body`, (tokens of a tile, D).

    """
    (output,) = graph.output
    width = output.type.tensor_type.shape.dim[-1].dim_value
    tile = make_graph(
        body,
        "tile",
        [make_tensor_value_info(name, TensorProto.INT64, [None] * RANKS.get(name, 2)) for name in slices.values()],
        [make_tensor_value_info(vectors, TensorProto.FLOAT, [None, width])],
    )
    name = f"{vectors}.all"
    loop = make_node("Scan", [*slices], [name], body=tile, num_scan_inputs=len(slices))
    result = make_tensor_value_info(name, TensorProto.FLOAT, [None, None, width])
    return make_graph([*outer, loop], "loop", [], [result])


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """Return `node` with `names` in place of those that they stand for."""
    renamed = NodeProto()
    renamed.CopyFrom(node)
    for side in (renamed.input, renamed.output):
        side[:] = [names.get(name, name) for name in side]
    return renamed
