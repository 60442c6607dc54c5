"""The token lookup of an artifact: token ids in, the vectors that other engines call `inputs_embeds` out.

Models with per-layer inputs have a second lookup: the token part of the inputs of all layers.

Letters: B batch, L length, V rows and D width of the table, N layers, P width of an input of a layer, n any number of
rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.errors import ExportError
from preblock.export.external_data import CHUNK_BYTES, place_of, set_place
from preblock.export.graph_builder import save_graph
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA, LAYER_TOKENS_GRAPH, PER_LAYER_TOKENS, TOKEN_EMBEDDINGS
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.runtime.session import Session

INPUT_IDS, INPUTS_EMBEDS = "input_ids", "inputs_embeds"
TEXT_EMBEDS = "text_embeds"
LAYERS = "layers."
"""Prefix of the names of the second lookup in a graph."""
ALIGNMENT_BYTES = 64
ROW_VALUES = 2**20
"""Values of the rows computed at once, to bound the working memory."""


@dataclass(frozen=True)
class TokenLookup:
    """The token lookup of an artifact.

    Args:
        folder: of the artifact.
        manifest: of the artifact.
        shape: (D,), or (N, P) for the inputs of all layers.
        output: name of the vectors in the graph.
        graph: file with the fewest outputs beside the vectors.

    """

    folder: Path
    manifest: Manifest
    shape: tuple[int, ...]
    output: str
    graph: str

    @property
    def per_layer(self) -> "TokenLookup | None":
        """The lookup of the inputs of all layers, (N, P); None for a model without them."""
        shape = self.manifest.shapes.get(PER_LAYER_TOKENS)
        if shape is None:
            return None
        return replace(self, shape=shape, output=PER_LAYER_TOKENS, graph=LAYER_TOKENS_GRAPH)

    @property
    def padded_ids(self) -> dict[int, int]:
        """The padding id by each id of images and audio: its inputs of layers stand in place of theirs.

        Such ids beyond the table of layers are not among them: the graph itself gives them row 0.
        """
        padding, layers = self.manifest.padding_id, (self.manifest.front_end or {}).get("per_layer")
        if padding is None or not isinstance(layers, dict):
            return {}
        rows: Any = layers["rows"]
        return {token: padding for token in self.manifest.refused_ids if token < rows}

    def rows(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of all ids in order, float32 (n, *shape), with the bits of the artifact on the CPU."""
        session = Session(self.folder, graph=self.graph)
        step = max(1, ROW_VALUES // math.prod(self.shape))
        for begin in range(0, self.manifest.vocab_size, step):
            ids = np.arange(begin, min(begin + step, self.manifest.vocab_size))[None]
            if self.output == PER_LAYER_TOKENS:
                for token, padding in self.padded_ids.items():
                    ids[ids == token] = padding
            feeds = {tensor.name: np.zeros_like(ids) for tensor in session.inputs}
            feeds |= {INPUT_IDS: ids, "offset": np.zeros(1, np.int64)}
            yield session.run(feeds, [self.output])[self.output][0]


def read_lookup(folder: Path, engine: str) -> TokenLookup:
    """Return the token lookup of the artifact in `folder`, with the embedding scale as `engine` takes it.

    For an engine outside the manifest's `consumers` it is the lookup of the model in transformers.

    Raises:
        ExportError: the artifact has no token lookup, or its vectors depend on more than token ids.
        ArtifactError: the artifact is damaged.

    """
    manifest = read_manifest(folder)
    if not isinstance(manifest, Manifest) or manifest.token_embeddings is None:
        raise ExportError(f"{manifest.family} has no token embeddings, so no engine takes them as {INPUTS_EMBEDS}")
    check_graphs(folder, manifest)
    embeddings = manifest.token_embeddings
    name = next(iter(embeddings.outputs_for(engine)), TOKEN_EMBEDDINGS)
    output = embeddings.output if name == TOKEN_EMBEDDINGS else name
    (graph,) = manifest.graphs_for((output,))
    lookup = TokenLookup(folder, manifest, (embeddings.width,), output, graph)
    _check_inputs(lookup)
    return lookup


def write_lookup(
    lookup: TokenLookup, file: Path, data: str, nodes: onnx.GraphProto | None = None, per_layer: str | None = None
) -> None:
    """Write the lookup as an ONNX graph over a data file of its own, in the stored dtype of the artifact.

    The graph has the input `input_ids`, int64 (B, L), and the output `inputs_embeds`, float32 (B, L, D).

    Args:
        lookup: the lookup.
        file: the graph.
        data: name of the data file, beside `file`.
        nodes: nodes, inputs and initializers to add; they compute `inputs_embeds` from `text_embeds`. Default none:
            the lookup is `inputs_embeds` itself.
        per_layer: name of the output float32 (B, L, N, P) for the inputs of all layers, if the model has them; default
            None: no such output.

    """
    model = _load_alone(lookup, INPUTS_EMBEDS if nodes is None else TEXT_EMBEDS)
    model.graph.output[0].name = INPUTS_EMBEDS
    if per_layer is not None and lookup.per_layer is not None:
        _add_layers(model, lookup.per_layer, per_layer)
    _copy_weights(model.graph, lookup.folder / DATA, file.with_name(data))
    if nodes is not None:
        model.graph.node.extend(nodes.node)
        model.graph.input.extend(nodes.input)
        model.graph.initializer.extend(nodes.initializer)
    save_graph(model, file)


def _check_inputs(lookup: TokenLookup) -> None:
    """Raise ExportError unless the vectors depend on token ids alone: no table holds those of mask and positions."""
    graph = onnx.load(lookup.folder / lookup.graph, load_external_data=False).graph
    read = _values_read(graph)
    inputs = [value.name for value in graph.input if value.name in read]
    if inputs != [INPUT_IDS]:
        family, got = lookup.manifest.family, ", ".join(inputs)
        raise ExportError(f"{family}: {INPUTS_EMBEDS} depends on {got}; expected {INPUT_IDS} alone")


def _values_read(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the values read by a node. A written graph has no other nodes than those of its outputs."""
    return {name for node in graph.node for name in node.input}


def _load_alone(lookup: TokenLookup, name: str, prefix: str = "") -> onnx.ModelProto:
    """Return the graph of a lookup, with its output as `name` and `prefix` before other names.

    It has only the inputs and initializers that its nodes read: `model.onnx` holds further ones.
    """
    model = onnx.load(lookup.folder / lookup.graph, load_external_data=False)
    graph, read = model.graph, _values_read(model.graph)
    names = {lookup.output: name, "": ""}  # an empty name stands for an absent input
    if not prefix:
        names[INPUT_IDS] = INPUT_IDS
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(value, prefix + value) for value in side]
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    given = [value for value in graph.input if value.name in read]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(tensors)
    graph.input.extend(given)
    for tensor in graph.initializer:
        tensor.name = prefix + tensor.name
    graph.output[0].name = name
    return model


def _add_layers(model: onnx.ModelProto, lookup: TokenLookup, name: str) -> None:
    """Add the lookup of the inputs of all layers to a graph, as output `name`.

    Ids of images and of audio take the inputs of the padding id, as in transformers.
    """
    layers = _load_alone(lookup, name, LAYERS)
    ids = INPUT_IDS
    for number, (token, padding) in enumerate(lookup.padded_ids.items()):
        constants = {f"{LAYERS}token_{number}": token, f"{LAYERS}padding_{number}": padding}
        model.graph.initializer.extend(
            onnx.helper.make_tensor(key, onnx.TensorProto.INT64, (), [value]) for key, value in constants.items()
        )
        match, padded = f"{LAYERS}match_{number}", f"{LAYERS}ids_{number}"
        token_name, padding_name = constants
        model.graph.node.append(onnx.helper.make_node("Equal", [ids, token_name], [match]))
        model.graph.node.append(onnx.helper.make_node("Where", [match, padding_name, ids], [padded]))
        ids = padded
    model.graph.node.append(onnx.helper.make_node("Identity", [ids], [LAYERS + INPUT_IDS]))
    model.graph.node.extend(layers.graph.node)
    model.graph.initializer.extend(layers.graph.initializer)
    model.graph.output.extend(layers.graph.output)


def _copy_weights(graph: onnx.GraphProto, source: Path, target: Path) -> None:
    """Copy the external weights of `graph` from the data file `source` into `target`, and let `graph` refer to it."""
    with source.open("rb") as before, target.open("xb") as after:
        for tensor in graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            offset, length = place_of(tensor)
            after.write(bytes(-after.tell() % ALIGNMENT_BYTES))
            set_place(tensor, after.tell(), length, target.name)
            before.seek(offset)
            for begin in range(0, length, CHUNK_BYTES):
                after.write(before.read(min(CHUNK_BYTES, length - begin)))
