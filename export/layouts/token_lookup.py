"""The token lookup of an artifact: token ids in, the vectors that other engines call `inputs_embeds` out.

Letters: B batch, L length, V rows and D width of the table, n any number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.errors import ExportError
from preblock.export.external_data import CHUNK_BYTES, place_of, set_place
from preblock.export.graph import cut, replace_fields, save_graph
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import DATA, TOKEN_EMBEDDINGS, Manifest
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.runtime.session import Session

INPUT_IDS, INPUTS_EMBEDS = "input_ids", "inputs_embeds"
TEXT_EMBEDS = "text_embeds"
ALIGNMENT_BYTES = 64
ROW_VALUES = 2**20
"""Values of the rows computed at once, to bound the working memory."""


@dataclass(frozen=True)
class TokenLookup:
    """The token lookup of an artifact.

    Args:
        folder: of the artifact.
        manifest: of the artifact.
        width: D.
        output: name of the vectors in the graph.
        graph: file with the fewest outputs beside the vectors.

    """

    folder: Path
    manifest: Manifest
    width: int
    output: str
    graph: str

    def rows(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of all ids in order, float32 (n, D), with the bits of the artifact on the CPU."""
        session = Session(self.folder, graph=self.graph)
        step = max(1, ROW_VALUES // self.width)
        for begin in range(0, self.manifest.vocab_size, step):
            ids = np.arange(begin, min(begin + step, self.manifest.vocab_size))[None]
            feeds = {tensor.name: np.zeros_like(ids) for tensor in session.inputs}
            feeds |= {INPUT_IDS: ids, "offset": np.zeros(1, np.int64)}
            yield session.run(feeds, [self.output])[self.output][0]


def read_lookup(folder: Path, engine: str) -> TokenLookup:
    """Return the token lookup of the artifact in `folder`, with the embedding scale as `engine` takes it.

    For an engine outside the manifest's `consumers` it is the lookup of the model in transformers.

    Raises:
        ExportError: the artifact has no token lookup.
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
    return TokenLookup(folder, manifest, embeddings.width, output, graph)


def write_lookup(lookup: TokenLookup, file: Path, data: str, nodes: onnx.GraphProto | None = None) -> None:
    """Write the lookup as an ONNX graph over a data file of its own, in the stored dtype of the artifact.

    The graph has the input `input_ids`, int64 (B, L), and the output `inputs_embeds`, float32 (B, L, D).

    Args:
        lookup: the lookup.
        file: the graph.
        data: name of the data file, beside `file`.
        nodes: nodes, inputs and initializers to add; they compute `inputs_embeds` from `text_embeds`. Default none:
            the lookup is `inputs_embeds` itself.

    """
    model = onnx.load(lookup.folder / lookup.graph, load_external_data=False)
    found, initializers, inputs = cut(model.graph, [lookup.output])
    if [value.name for value in inputs] != [INPUT_IDS]:
        raise ExportError(f"{lookup.graph}: {lookup.output} depends on more than {INPUT_IDS}")
    name = INPUTS_EMBEDS if nodes is None else TEXT_EMBEDS
    for node in found:
        for side in (node.input, node.output):
            side[:] = [name if value == lookup.output else value for value in side]
    shape: list[str | int | None] = ["batch", "length", lookup.width]
    output = onnx.helper.make_tensor_value_info(INPUTS_EMBEDS, onnx.TensorProto.FLOAT, shape)
    replace_fields(model.graph, node=found, initializer=initializers, input=inputs, output=[output], value_info=[])
    _copy_weights(model.graph, lookup.folder / DATA, file.with_name(data))
    if nodes is not None:
        model.graph.node.extend(nodes.node)
        model.graph.input.extend(nodes.input)
        model.graph.initializer.extend(nodes.initializer)
    save_graph(model, file)


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
