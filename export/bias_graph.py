"""Writes the ONNX graph of a pairwise bias from its configuration.

Lengths are values of its inputs, not axes. The bucket of a distance is found by comparing integers: the last bit of a
logarithm depends on the library.

Letters: D model width, H heads, Q query length, K key length.
"""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from preblock.export.graph_builder import IR_VERSION, OPSET
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.bias import (
    AlibiConfig,
    RelativeSinusoidConfig,
    T5Config,
    alibi_slopes,
    relative_frequencies,
    t5_borders,
)

Array = NDArray[Any]

ANCHOR = {
    "query": "anchor = Add (query_index, query_offset)",
    "first": "anchor = Mul (query_index, zero)",
    "last": "nothing = Mul (query_index, zero) last = Sub (key_length, one) anchor = Add (nothing, last)",
}
ROUND = {
    "float32": "{0}_rounded = Identity ({0})",
    "bfloat16": "{0}_short = Cast <to = 16> ({0}) {0}_rounded = Cast <to = 1> ({0}_short)",
}
WEIGHT = "bias.weight"
"""Name of the trained table of T5, in the graph and among the tensors of a front-end."""


def build_bias(data: FrontEndData) -> onnx.ModelProto:
    """Return the graph of the attention bias of a front-end.

    Inputs are int64 `query_offset`, `query_length` and `key_length`, each of shape (1,); a sinusoid has no offset.
    The output is float32 `bias` (1, H, Q, K), of a sinusoid `relative_positions` (rows, D). A trained table is stored
    in the graph itself: published models have 32 buckets by at most 128 heads, a few kilobytes.
    """
    assert data.config.bias is not None
    match data.config.bias:
        case AlibiConfig() as config:
            return _alibi(config)
        case T5Config() as config:
            return _t5(config, data.tensors[WEIGHT])
        case RelativeSinusoidConfig() as config:
            return _sinusoid(config)


def _alibi(bias: AlibiConfig) -> onnx.ModelProto:
    text = f"""
      {ANCHOR[bias.anchor]}
      relative = Sub (key_index, anchor)
      number = Cast <to = 1> (relative)
      {ROUND[bias.arithmetic].format("number")}
      product = Mul (number_rounded, slopes)
      {ROUND[bias.arithmetic].format("product")}
      bias = Div (product_rounded, divisor)
    """
    slopes, divisor = alibi_slopes(bias).reshape(1, -1, 1, 1), np.array(bias.divisor, np.float32)
    return _pairwise(bias.heads, text, slopes=slopes, divisor=divisor)


def _t5(bias: T5Config, weight: Array) -> onnx.ModelProto:
    # A diagonal of the matrix has one distance: only Q + K - 1 buckets are needed, not Q x K.
    if bias.bidirectional:
        distance = "distance = Abs (relative)"
        bucket = (
            "after = Greater (relative, zero) after_number = Cast <to = 7> (after) "
            "first_bucket = Mul (after_number, one_way) bucket = Add (first_bucket, count)"
        )
    else:
        distance = "before = Neg (relative) distance = Max (before, zero)"
        bucket = "bucket = Identity (count)"
    text = f"""
      end = Add (query_offset, query_length)
      lowest = Sub (one, end)
      beyond = Sub (key_length, query_offset)
      lowest_scalar = Squeeze (lowest)
      beyond_scalar = Squeeze (beyond)
      relative = Range (lowest_scalar, beyond_scalar, one)
      {distance}
      distance_column = Unsqueeze (distance, axis_1)
      reached = GreaterOrEqual (distance_column, borders)
      reached_number = Cast <to = 7> (reached)
      count = ReduceSum <keepdims = 0> (reached_number, axis_1)
      {bucket}
      diagonals = Gather <axis = 0> ("{WEIGHT}", bucket)
      diagonals_by_head = Transpose <perm = [1, 0]> (diagonals)
      last_query = Sub (query_length, one)
      shifted_key_index = Add (key_index, last_query)
      diagonal = Sub (shifted_key_index, query_index)
      matrix = Gather <axis = 1> (diagonals_by_head, diagonal)
      axis_0 = Constant <value_ints = [0]> ()
      bias = Unsqueeze (matrix, axis_0)
    """
    one_way = {"one_way": np.array(bias.buckets // 2)} if bias.bidirectional else {}
    constants = {WEIGHT: weight, "borders": np.array(t5_borders(bias)), **one_way}
    return _pairwise(weight.shape[1], text, **constants)


def _sinusoid(bias: RelativeSinusoidConfig) -> onnx.ModelProto:
    limit = bias.clamp_len
    text = f"""
      rows = Add (key_length, {"query_length" if bias.bidirectional else "one"})
      rows_scalar = Squeeze (rows)
      index = Range (zero, rows_scalar, one)
      distance = Sub (keys, index)
      clamped = {"Identity (distance)" if limit is None else "Clip (distance, lower, upper)"}
      number = Cast <to = 1> (clamped)
      number_column = Unsqueeze (number, axis_1)
      angle = Mul (number_column, frequencies)
      sine = Sin (angle)
      cosine = Cos (angle)
      relative_positions = Concat <axis = -1> (sine, cosine)
    """
    limits = {} if limit is None else {"lower": np.array(-limit), "upper": np.array(limit)}
    inputs, output = ("query_length", "key_length"), f"float[rows, {bias.width}] relative_positions"
    return _model(inputs, output, text, frequencies=relative_frequencies(bias.width), **limits)


def _pairwise(heads: int, body: str, **constants: Array) -> onnx.ModelProto:
    """Return a graph to compute `bias` from `query_index` (Q, 1) and `key_index` (K,) by `body`."""
    indices = """
      queries = Squeeze (query_length)
      query_range = Range (zero, queries, one)
      query_index = Unsqueeze (query_range, axis_1)
      key_index = Range (zero, keys, one)
    """
    output = f"float[1, {heads}, query_length, key_length] bias"
    return _model(("query_offset", "query_length", "key_length"), output, indices + body, **constants)


def _model(inputs: tuple[str, ...], output: str, body: str, **constants: Array) -> onnx.ModelProto:
    """Return the model of a graph in onnx's own language, over the named arrays."""
    model = onnx.parser.parse_model(f"""
    <ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}]>
    bias ({", ".join(f"int64[1] {name}" for name in inputs)}) => ({output}) {{
      zero = Constant <value_int = 0> ()
      one = Constant <value_int = 1> ()
      axis_1 = Constant <value_ints = [1]> ()
      keys = Squeeze (key_length)
      {body}
    }}
    """)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    return model
