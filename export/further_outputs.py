"""Writes the graphs of a front-end: its vectors with rotary angles, lookups, inputs of layers, n-gram embeddings.

Letters: B batch, L length, D model width, R rotary width, N layers, P width of an input of a layer, n largest number of
tokens of an n-gram, H heads of a layer, E width of the n-gram embeddings of a layer.
"""

from itertools import accumulate

import numpy as np

from preblock.export.graph import INPUT_IDS, MASK, OFFSET, write_position_index, write_product, write_steps
from preblock.export.graph_builder import Array, GraphBuilder, Outputs
from preblock.models.config import FrontEndConfig
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.modules.rotary_config import attention_factor, rotary_frequencies
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.service.artifacts.names import CONTEXT, EMBEDDINGS, NGRAM_ROW_IDS, PER_LAYER_TOKENS


def write_vectors(graph: GraphBuilder, config: FrontEndConfig, rotary: bool = True) -> Outputs:
    """Write all steps, and the rotary outputs on request."""
    signature = config.signature
    graph.input(INPUT_IDS, "batch", "length")
    graph.input(OFFSET, "offsets")
    for name in (*signature.indices, *([MASK] if signature.needs_mask else [])):
        graph.input(name, "batch", "length")
    outputs: Outputs = {EMBEDDINGS: (write_steps(graph, config), "float32", ("batch", "length", signature.width))}
    for output in config.rotary if rotary else ():
        for name, value in _write_rotary(graph, output, write_position_index(graph)).items():
            outputs[name] = (value, output.dtype, ("offsets", "length", output.columns))
    return outputs


def write_lookup(graph: GraphBuilder, config: FrontEndConfig, output: str, count: int) -> Outputs:
    """Write the first `count` steps, which need token ids alone."""
    graph.input(INPUT_IDS, "batch", "length")
    return {output: (write_steps(graph, config, count), "float32", ("batch", "length", config.widths[count - 1]))}


def write_layers(graph: GraphBuilder, config: FrontEndConfig, output: str) -> Outputs:
    """Write the inputs of all layers: their token part, or the combined form."""
    layers = config.per_layer
    assert layers is not None
    graph.input(INPUT_IDS, "batch", "length")
    if output == PER_LAYER_TOKENS:
        value, sizes = _write_layer_tokens(graph, config, layers), (layers.layers, layers.width)
        return {output: (value, "float32", ("batch", "length", *sizes))}
    value = _write_layer_inputs(graph, config, layers, write_steps(graph, config, config.lookup))
    return {output: (value, "float32", ("batch", "length", layers.layers * layers.width))}


def write_ngram_outputs(graph: GraphBuilder, config: FrontEndConfig, output: str, given: bool = False) -> Outputs:
    """Write the row ids of n-grams, or their embeddings; the row ids are `given` or computed."""
    ngrams = config.ngrams
    assert ngrams is not None
    rows = ("batch", "length", len(ngrams.layers), ngrams.heads_of_layer)
    if given:
        row_ids = graph.input(NGRAM_ROW_IDS, *rows)
    else:
        ids, context = graph.input(INPUT_IDS, "batch", "length"), graph.input(CONTEXT, "batch", ngrams.history)
        row_ids = _write_ngram_row_ids(graph, ngrams, config.tokens.rows, ids, context)
    if output == NGRAM_ROW_IDS:
        return {output: (row_ids, "int64", rows)}
    return {output: (_write_ngrams(graph, ngrams, row_ids), "float32", ("batch", "length", rows[2], ngrams.width))}


def _write_rotary(graph: GraphBuilder, output: RotaryOutput, index: str) -> dict[str, str]:
    """Write cosines and sines of the positions `index`, (1 or B, L), and return the values by output.

    They are computed in float64, because the last bit of onnxruntime's float32 cosine depends on the place of an angle
    in the tensor. The product of position and frequency is in the type of the angles.
    """
    name, config = output.named("rotary"), output.config
    frequencies = graph.derived(f"{name}.frequencies", lambda: rotary_frequencies(config))
    column = graph.once("index.column", lambda: graph.add("index.column", "Unsqueeze", index, graph.numbers(-1)))
    typed = f"index.{config.angles}"
    position = graph.once(typed, lambda: graph.cast(typed, column, config.angles))
    angle = graph.add(f"{name}.angle", "Mul", position, frequencies)
    if config.angles == "float32":
        angle = graph.cast(f"{name}.wide_angle", angle, "float64")
    cos, sin = (_write_turn(graph, output, op, angle) for op in ("Cos", "Sin"))
    if output.form == "fused":
        return {output.names[0]: graph.add(f"{name}.cos_sin", "Concat", cos, sin, axis=-1)}
    if output.form == "full":
        cos, sin = (graph.add(f"{part}.twice", "Concat", part, part, axis=-1) for part in (cos, sin))
    return dict(zip(output.names, (cos, sin), strict=True))


def _write_turn(graph: GraphBuilder, output: RotaryOutput, op: str, angle: str) -> str:
    """Write the cosine or the sine of the R/2 angles, with its factor, in the type of the output."""
    name = f"{output.named('rotary')}.{op.lower()}"
    value = graph.cast(f"{name}.float32", graph.add(f"{name}.float64", op, angle), "float32")
    factor = attention_factor(output.config)
    if factor != 1:
        value = graph.add(f"{name}.product", "Mul", value, graph.number(factor, "float32"))
    return value if output.dtype == "float32" else graph.cast(f"{name}.{output.dtype}", value, output.dtype)


def _write_layer_tokens(graph: GraphBuilder, config: FrontEndConfig, layers: PerLayerConfig) -> str:
    """Write the token part of the inputs of all layers, float32 (B, L, N, P)."""
    ids = INPUT_IDS
    if layers.rows < config.tokens.rows:  # further ids take row 0
        known = graph.add("per_layer.is_known", "Less", ids, graph.number(layers.rows, "int64"))
        ids = graph.add("per_layer.ids", "Where", known, ids, graph.number(0, "int64"))
    vectors = graph.rows("per_layer.vectors", "per_layer.tokens.weight", ids)
    scaled = graph.add("per_layer.scaled", "Mul", vectors, graph.number(layers.width**0.5, "float32"))
    sizes = graph.numbers(0, 0, layers.layers, layers.width)
    return graph.add("per_layer.token_inputs", "Reshape", scaled, sizes)


def _write_layer_inputs(graph: GraphBuilder, config: FrontEndConfig, layers: PerLayerConfig, x: str) -> str:
    """Write the combined inputs of all layers, float32 (B, L, N * P), from the model's own lookup `x` (B, L, D)."""
    by = graph.number(config.widths[config.lookup - 1] ** -0.5, "float32")
    flat = graph.add("per_layer.projected", "Mul", write_product(graph, "per_layer.project", x), by)
    projected = graph.add("per_layer.layers", "Reshape", flat, graph.numbers(0, 0, layers.layers, layers.width))
    square = graph.add("per_layer.square", "Pow", projected, graph.number(2.0, "float32"))
    mean = graph.add("per_layer.mean", "ReduceMean", square, graph.numbers(-1), keepdims=1)
    shifted = graph.add("per_layer.shifted_mean", "Add", mean, graph.number(layers.eps, "float32"))
    root = graph.add("per_layer.reciprocal", "Pow", shifted, graph.number(-0.5, "float32"))
    normed = graph.add("per_layer.normed", "Mul", projected, root)
    weighted = graph.add("per_layer.weighted", "Mul", normed, graph.weight("per_layer.norm.weight"))
    total = graph.add("per_layer.sum", "Add", weighted, _write_layer_tokens(graph, config, layers))
    combined = graph.add("per_layer.combined", "Mul", total, graph.number(2**-0.5, "float32"))
    return graph.add("per_layer.inputs", "Reshape", combined, graph.numbers(0, 0, layers.layers * layers.width))


def _write_ngram_row_ids(graph: GraphBuilder, config: NgramConfig, vocab_size: int, ids: str, context: str) -> str:
    """Write the row of each head in the table of its layer, int64 (B, L, N, H), for all layers at once.

    A head hashes the last 2 to n ids: the exclusive or of each id times its factor, modulo the rows of the head. Ids
    before the last end of sequence count as that end.
    """
    whole = graph.add("ngrams.ids", "Concat", context, ids, axis=1)
    factors = np.array(config.multipliers(vocab_size))
    shape = (len(config.layers), config.history, config.heads)
    rows = np.array(config.head_rows).reshape(shape)
    begins = np.array([list(accumulate(heads, initial=0))[:-1] for heads in config.head_rows]).reshape(shape)

    def constant(name: str, shift: int, values: Array) -> str:
        return graph.derived(f"ngrams.{name}.{shift}", lambda: values)

    def mix(shift: int, earlier: str) -> str:
        column = graph.add(f"ngrams.column.{shift}", "Unsqueeze", earlier, graph.numbers(-1))
        return graph.add(f"ngrams.product.{shift}", "Mul", column, constant("factors", shift, factors[:, shift]))

    earlier, mixed, heads = ids, mix(0, ids), []
    for shift in range(1, config.size):
        bounds = (graph.numbers(config.history - shift), graph.numbers(-shift), graph.numbers(1))
        taken = graph.add(f"ngrams.earlier.{shift}", "Slice", whole, *bounds)
        if shift > 1:
            reset = graph.number(config.reset_id, "int64")
            at_end = graph.add(f"ngrams.at_end.{shift}", "Equal", earlier, reset)
            taken = graph.add(f"ngrams.kept.{shift}", "Where", at_end, reset, taken)
        earlier = taken
        mixed = graph.add(f"ngrams.mixed.{shift}", "BitwiseXor", mixed, mix(shift, earlier))
        column = graph.add(f"ngrams.hash.{shift}", "Unsqueeze", mixed, graph.numbers(-1))
        row = graph.add(f"ngrams.row.{shift}", "Mod", column, constant("rows", shift, rows[:, shift - 1]))
        begin = constant("begins", shift, begins[:, shift - 1])
        heads.append(graph.add(f"ngrams.row_id.{shift}", "Add", row, begin))
    return graph.add("ngrams.row_ids", "Concat", *heads, axis=-1)


def _write_ngrams(graph: GraphBuilder, config: NgramConfig, row_ids: str) -> str:
    """Write the n-gram embeddings, float32 (B, L, N, E), of the rows `row_ids`, (B, L, N, H)."""
    layers = []
    for number in range(len(config.layers)):
        name = f"ngrams.{number}"
        rows = graph.add(f"{name}.row_ids", "Gather", row_ids, graph.number(number, "int64"), axis=2)
        vectors = graph.rows(f"{name}.vectors", f"ngrams.tables.{number}.weight", rows, axes=3)
        layers.append(graph.add(f"{name}.embeddings", "Reshape", vectors, graph.numbers(0, 0, 1, config.width)))
    return graph.add("ngrams.embeddings", "Concat", *layers, axis=2)
