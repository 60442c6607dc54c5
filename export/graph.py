"""Writes the ONNX graph of a front-end: dynamic axes, one external data file.

Letters: B batch, L length, D output width.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import Message
from torch import Tensor, nn

from preblock.export.errors import ExportError
from preblock.export.external_data import map_weights
from preblock.export.own_modules.tracing import export_program
from preblock.export.progress import Report
from preblock.models.config import FrontEndConfig
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.modules.ngram_config import CONTEXT
from preblock.models.modules.signature import Signature
from preblock.models.steps import Project, names_of
from preblock.service.artifacts.names import (
    EMBEDDINGS_GRAPH,
    GRAPH,
    LAYER_INPUTS_GRAPH,
    LAYER_TOKENS_GRAPH,
    NGRAM_IDS_GRAPH,
    NGRAM_ROW_IDS,
    NGRAM_ROWS_GRAPH,
    NGRAMS,
    NGRAMS_GRAPH,
    PER_LAYER,
    PER_LAYER_TOKENS,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPH,
    UNSCALED,
    UNSCALED_GRAPH,
)

MODULE, TRAINED, TRANSPOSED = "frontend.", (".weight", ".bias"), ".transposed"
"""Parts of the names of initializers: the prefix of the front-end, the suffixes of trained weights, and the suffix of
transposed ones."""
BIAS = "bias."
"""Prefix of the weights stored in `bias.onnx`."""


class _ExportedModule(nn.Module):
    """The front-end with the named inputs of its graph, and every output as a tuple."""

    def __init__(self, frontend: FrontEnd | CustomFrontEnd) -> None:
        super().__init__()
        self.frontend = frontend

    def forward(
        self,
        input_ids: Tensor,
        offset: Tensor,
        indices: dict[str, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        optional = {"indices": indices, "attention_mask": attention_mask}
        given = {name: value for name, value in optional.items() if value is not None}
        vectors: Tensor = self.frontend(input_ids, offset, **given)
        if not isinstance(self.frontend, FrontEnd):
            return (vectors,)
        further = self.frontend.per_layer_outputs(input_ids) | self.frontend.ngram_outputs(input_ids, context)
        lookups = [
            further[name] if name in further else self.frontend.look_up(input_ids, name != UNSCALED)
            for name in _lookups(self.frontend.signature)
        ]
        return vectors, *lookups, *self.frontend.rotary_outputs(input_ids, offset).values()


def _lookups(signature: Signature) -> dict[str, str]:
    """Return the outputs without positions that differ from `embeddings`, and the graph of each."""
    graphs = {} if signature.lookup_width is None else {TOKEN_EMBEDDINGS: TOKEN_GRAPH}
    graphs |= {} if signature.unscaled_width is None else {UNSCALED: UNSCALED_GRAPH}
    layers = {PER_LAYER_TOKENS: LAYER_TOKENS_GRAPH, PER_LAYER: LAYER_INPUTS_GRAPH}
    graphs |= {} if signature.per_layer is None else layers
    graphs |= {} if signature.row_ids is None else {NGRAM_ROW_IDS: NGRAM_IDS_GRAPH}
    return graphs if signature.ngrams is None else graphs | {NGRAMS: NGRAMS_GRAPH}


def export_graph(frontend: FrontEnd | CustomFrontEnd, folder: Path, report: Report = lambda _: None) -> None:
    """Write the graphs of `frontend` (in evaluation mode) into `folder`, over one data file.

    `report` receives the progress of a long step.

    - `model.onnx` has int64 inputs `input_ids` (batch, length) and `offset` (1,) or (batch,), and the float32 output
      `embeddings` (batch, length, D). Further indices and `attention_mask` (batch, length) are inputs if the
      front-end has them.
    - `token.onnx` has input `input_ids` and output `token_embeddings`; it is omitted if that equals `embeddings`.
    - `layer.tokens.onnx` and `layer.inputs.onnx` have the outputs of `FrontEnd.per_layer_outputs`, if there are any.
    - `ngrams.onnx` and `ngram.ids.onnx` have the outputs of `FrontEnd.ngram_outputs`, and the further input `context`
      (batch, n - 1).
    - `ngram.rows.onnx` has the embeddings of row ids, its only input.
    - `unscaled.onnx` has output `unscaled_token_embeddings`, if `token_embeddings` include an embedding scale.
    - With rotary attention, `model.onnx` also has the outputs of `FrontEnd.rotary_outputs`, (1 or batch, length, R).
      `embeddings.onnx` omits them, because onnxruntime computes every output of a graph.
    """
    signature = frontend.signature
    lookups = _lookups(signature)
    samples, shapes = _sample_inputs(signature)
    whole = export_program(
        _ExportedModule(frontend),
        folder,
        report,
        kwargs=samples,
        dynamic_shapes=shapes,
        input_names=[
            "input_ids",
            "offset",
            *signature.indices,
            *filter(samples.__contains__, ("attention_mask", CONTEXT)),
        ],
        output_names=["embeddings", *lookups, *signature.rotary],
    )
    del whole.graph.value_info[:]  # shapes inferred for one offset
    for node in (*whole.graph.input, *whole.graph.output):
        if node.name == "offset" or node.name in signature.rotary:  # (1,) or (batch,)
            node.type.tensor_type.shape.dim[0].dim_param = "offsets"
    if isinstance(frontend, FrontEnd):
        _name_projections(whole, frontend.config)
    inputs = [node.name for node in whole.graph.input if node.name != CONTEXT]
    main = _only(whole, "embeddings", *signature.rotary, inputs=inputs)
    if isinstance(frontend, FrontEnd):
        _restore_merged(main, whole, frontend)
    save_graph(main, folder / GRAPH)
    if signature.rotary:
        save_graph(_only(whole, "embeddings", inputs=inputs), folder / EMBEDDINGS_GRAPH)
    for name, graph in lookups.items():
        history = [CONTEXT] if name in (NGRAM_ROW_IDS, NGRAMS) else []
        save_graph(_only(whole, name, inputs=["input_ids", *history]), folder / graph)
    if NGRAMS in lookups:
        save_graph(_build_rows_graph(whole), folder / NGRAM_ROWS_GRAPH)


def _sample_inputs(signature: Signature) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of the front-end for its export, and the axes of each argument with any size."""
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # `offset` has one element, so that (1,) broadcasts over the batch in the graph; other sizes are arbitrary.
    # Each input is a separate tensor: the exporter merges arguments with the same tensor into one input.
    samples: dict[str, Any] = {"input_ids": _ones(2, 3), "offset": _ones(1)}
    shapes: dict[str, Any] = {"input_ids": axes, "offset": None}
    if signature.indices:
        samples["indices"] = {name: _ones(2, 3) for name in signature.indices}
        shapes["indices"] = dict.fromkeys(signature.indices, axes)
    if signature.needs_mask:
        samples["attention_mask"], shapes["attention_mask"] = _ones(2, 3), axes
    if signature.history:
        samples[CONTEXT], shapes[CONTEXT] = _ones(2, signature.history), {0: axes[0]}
    return samples, shapes


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _name_projections(model: onnx.ModelProto, config: FrontEndConfig) -> None:
    """Name the weights of projections; the exporter transposes and renames them."""
    projections = [
        f"{MODULE}{name}.weight{TRANSPOSED}"
        for name, step in zip(names_of(config.steps), config.steps, strict=True)
        if isinstance(step, Project)
    ]
    projections += [f"{MODULE}per_layer.project.weight{TRANSPOSED}"] if config.per_layer else []
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    names: dict[str, str] = {}
    for name, product in zip(projections, products, strict=True):
        product.input[1] = names.setdefault(product.input[1], name)  # equal weights share one initializer
    for initializer in model.graph.initializer:
        initializer.name = names.get(initializer.name, initializer.name)


def _restore_merged(model: onnx.ModelProto, whole: onnx.ModelProto, frontend: FrontEnd) -> None:
    """Add the weights of other graphs, and those merged by the exporter with equal ones: `model` holds every weight."""
    known = {tensor.name for tensor in model.graph.initializer}
    prefixes = (f"{MODULE}per_layer.", f"{MODULE}ngrams.")
    further = (tensor for tensor in whole.graph.initializer if tensor.name.startswith(prefixes))
    model.graph.initializer.extend([tensor for tensor in further if tensor.name not in known])
    names = {initializer.name.removesuffix(TRANSPOSED) for initializer in model.graph.initializer}
    for name, weight in frontend.state_dict().items():
        if MODULE + name not in names and not name.startswith(BIAS):
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), MODULE + name))


def _only(model: onnx.ModelProto, *names: str, inputs: Collection[str]) -> onnx.ModelProto:
    """Return the part of `model` for the outputs `names`, with the inputs `inputs`."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    outputs = [value for value in model.graph.output if value.name in names]
    nodes, initializers, _ = cut(model.graph, names)
    given = [value for value in model.graph.input if value.name in inputs]
    replace_fields(part.graph, node=nodes, initializer=initializers, input=given, output=outputs)
    return part


def _build_rows_graph(whole: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph from the row ids of n-grams, (batch, length, layers, heads), to their embeddings.

    The part of `whole` would need the shape of `input_ids`.
    """
    values = {value.name: value for value in whole.graph.output}
    width = values[NGRAMS].type.tensor_type.shape.dim[3].dim_value
    gathers = [node for node in whole.graph.node if node.op_type == "Gather"]
    tables = [node.input[0] for node in gathers if node.input[0].startswith(f"{MODULE}ngrams.tables.")]
    constants = {"flat": [0, -1], "side_by_side": [0, -1, 1, width]}
    nodes, layers = [], [f"layer_{number}" for number in range(len(tables))]
    for number, (layer, table) in enumerate(zip(layers, tables, strict=True)):
        constants[f"{layer}_number"] = [number]
        ids, flat, rows = (f"{layer}_{name}" for name in ("ids", "flat_ids", "rows"))
        nodes += [
            onnx.helper.make_node("Gather", [NGRAM_ROW_IDS, f"{layer}_number"], [ids], axis=2),
            onnx.helper.make_node("Reshape", [ids, "flat"], [flat]),
            onnx.helper.make_node("Gather", [table, flat], [rows]),
            onnx.helper.make_node("Reshape", [rows, "side_by_side"], [layer]),
        ]
    nodes.append(onnx.helper.make_node("Concat", layers, [NGRAMS], axis=2))
    stored = [tensor for tensor in whole.graph.initializer if tensor.name in tables]
    stored += [onnx.numpy_helper.from_array(np.array(numbers), name) for name, numbers in constants.items()]
    part = onnx.ModelProto()
    part.CopyFrom(whole)
    given, found = [values[NGRAM_ROW_IDS]], [values[NGRAMS]]
    replace_fields(part.graph, node=nodes, initializer=stored, input=given, output=found, value_info=[])
    return part


def cut(
    graph: onnx.GraphProto, outputs: Collection[str]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], list[onnx.ValueInfoProto]]:
    """Return the nodes, the initializers and the inputs needed to compute the values `outputs`."""
    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(_inputs(node))
            nodes.append(node)
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    return nodes[::-1], initializers, [value for value in graph.input if value.name in needed]


def replace_fields(graph: onnx.GraphProto, **fields: Sequence[Message]) -> None:
    """Replace repeated fields of `graph`."""
    for field, values in fields.items():
        graph.ClearField(field)
        getattr(graph, field).extend(values)


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of all inputs of `node`, including the outer values used by its subgraphs."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _inputs(inner)


def save_graph(model: onnx.ModelProto, file: Path) -> None:
    """Write `model` over its existing data file, and check both with ONNX; raise ExportError if ONNX rejects it."""
    onnx.save(model, file)
    try:
        onnx.checker.check_model(file, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise ExportError(f"{file.name}: ONNX rejects the graph that the exporter of torch wrote: {reason}") from error


def read_initializers(folder: Path) -> dict[str, Tensor]:
    """Return the trained float32 weights of an artifact, under the names of `FrontEnd.state_dict()`.

    They are mapped from the data file. Derived tables (sinusoids) are omitted: a new module computes them.
    """
    weights = {}
    for stored, values in map_weights(folder).items():
        name = stored.removesuffix(TRANSPOSED)
        if name.startswith(MODULE) and name.endswith(TRAINED) and values.dtype == np.float32:
            values = values if name == stored else np.ascontiguousarray(values.T)
            weights[name.removeprefix(MODULE)] = torch.from_numpy(values)
    return weights
