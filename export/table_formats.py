"""The stored types of tables: rounding values to them, and widening gathered rows in a graph.

Letters: V rows and D width of a table, n any number of rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from preblock.export.errors import ExportError
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import shapes_of

Array = NDArray[Any]

MATRIX = re.compile(r"(per_layer\.)?project\d*\.weight")
"""Names of the matrices of projections."""
FLOAT32 = re.compile(r"(weights|bias)\d*\.")
"""Names of the tables that stay in float32: weights of tokens, and the attention bias."""
BLOCK = 32
"""Columns of a row that share a scale, in int4."""

GATHER = "short = Gather <axis = 0> (codes, index)"
CODES, SCALE, WIDTH = ENDINGS = "", ".scale", ".width"
Parts = dict[str, Array]
"""The parts of a stored table, by the suffixes of their initializers."""


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """The stored form of a table.

    Args:
        dtype: name of the type.
        scale: unit with one scale; None for a type without scales.
        block: columns of a block; None unless each block has a scale.
        codes: type of a stored value.
        narrow: makes the parts stored for each row, from float32 rows (n, D) and the parts stored once.
        widen: makes float32 (n, D) from all parts of n rows, bit for bit equal to `nodes`.
        nodes: the same in ONNX's textual form, for a table of width D and an index of a number of axes. They compute
            float32 `vectors` (..., D) of int64 `index` (...) from the initializers `codes`, `scale` and `width`.
        whole: makes the parts stored once, from the rows of a table in float32, some (n, D) at a time; default none.

    """

    dtype: Literal["float16", "bfloat16", "int8", "int4"]
    scale: Literal["row", "tensor", "block"] | None = None
    block: int | None = None
    codes: np.dtype[Any]
    narrow: Callable[[Array, Parts], Parts]
    widen: Callable[[Parts], Array]
    nodes: Callable[[int, int], str]
    whole: Callable[[Iterator[Array]], Parts] = lambda _: {}


def find_format(dtype: str, scale: str | None = None) -> TableFormat | None:
    """Return the format for `--dtype` and `--scale`; None for float32.

    Raises:
        ExportError: there is no such format.

    """
    if dtype == "float32":
        return None
    for format_ in FORMATS:
        if format_.dtype == dtype and scale in (None, format_.scale):
            return format_
    if scale is not None:
        raise ExportError(f"--scale: got {scale!r}, expected row, tensor")
    raise ExportError(f"--dtype: got {dtype!r}, expected float32, float16, bfloat16, int8, int4")


def find_stored(tensors: Mapping[str, onnx.TensorProto]) -> TableFormat | None:
    """Return the format of the token table among the initializers of a graph; None for float32."""
    codes, scale = tensors["tokens.weight"], tensors.get(f"tokens.weight{SCALE}")
    shared = scale is not None and not scale.dims
    for format_ in FORMATS:
        same = codes.data_type == onnx.helper.np_dtype_to_tensor_dtype(format_.codes)
        if same and shared == (format_.scale == "tensor"):
            return format_
    return None


def table_names(config: FrontEndConfig) -> list[str]:
    """Return the names of the trained tables, stored in the chosen type, in their order in `state_dict()`.

    Norms, projections, weights of tokens, biases and sinusoids stay in float32.
    """
    shapes = shapes_of(config)
    return [name for name in shapes if len(shapes[name]) == 2 and not (MATRIX.match(name) or FLOAT32.match(name))]


def transposed_names(config: FrontEndConfig) -> list[str]:
    """Return the names of the matrices of projections, (out, in) in `state_dict()`, and (in, out) in a graph.

    A product with a matrix transposed in the graph would keep a second copy of it in memory.
    """
    return [name for name in shapes_of(config) if MATRIX.match(name)]


_QUIETLY = np.errstate(over="ignore", invalid="ignore")
"""Computes with infinite values and NaN: the comparison of the stored table refuses them."""


def _scale(largest: Array, levels: int) -> Array:
    """Return the scale to round `largest` to the highest of `levels`; 1 for a table of zeros."""
    scale = largest / np.float32(levels)
    return np.where(scale == 0, np.float32(1), scale)


@_QUIETLY
def _round(values: Array, scale: Array, levels: int) -> Array:
    return np.rint(values / scale).clip(-levels, levels)


@_QUIETLY
def _cast(values: Array, dtype: DTypeLike) -> Array:
    return values.astype(dtype)


def _int8_rows(rows: Array, _: Parts) -> Parts:
    scale = _scale(np.abs(rows).max(1, keepdims=True), 127)
    return {CODES: _cast(_round(rows, scale, 127), np.int8), SCALE: scale}


def _int8_whole(table: Iterator[Array]) -> Parts:
    return {SCALE: _scale(np.max([np.abs(rows).max() for rows in table]), 127)}


@_QUIETLY
def _int8_widen(parts: Parts) -> Array:
    return parts[CODES].astype(np.float32) * parts[SCALE]


def _int4_whole(table: Iterator[Array]) -> Parts:
    width = next(table).shape[1]
    return {WIDTH: np.array([width])} if width % BLOCK else {}


def _int4_rows(rows: Array, _: Parts) -> Parts:
    # Zeros pad the last block. A byte holds a column of the first half in its lower four bits, and one of the second
    # half in its upper four, so that unpacking is one concatenation.
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
    blocks = padded.reshape(len(rows), -1, BLOCK)
    scale = _scale(np.abs(blocks).max(2, keepdims=True), 7)
    codes = _cast(_round(blocks, scale, 7) + np.float32(8), np.uint8).reshape(padded.shape)
    lower, upper = np.split(codes, 2, axis=1)
    return {CODES: lower | upper << np.uint8(4), SCALE: scale}


@_QUIETLY
def _int4_widen(parts: Parts) -> Array:
    codes = parts[CODES]
    numbers = np.concatenate((codes & np.uint8(15), codes >> np.uint8(4)), axis=1).astype(np.float32) - np.float32(8)
    blocks = numbers.reshape(len(numbers), numbers.shape[1] // BLOCK, BLOCK) * parts[SCALE]
    rows: Array = blocks.reshape(numbers.shape)
    return rows[:, : int(parts[WIDTH][0])] if WIDTH in parts else rows


def _int4_nodes(width: int, axes: int) -> str:
    blocks, kept = -(-width // BLOCK), "0, " * axes
    # Gather does not support int4 in ONNX.
    unpacked = f"""
      packed = Gather <axis = 0> (codes, index)
      four_bits = Constant <value = uint8 {{15}}> ()
      four = Constant <value = uint8 {{4}}> ()
      lower = BitwiseAnd (packed, four_bits)
      upper = BitShift <direction = "RIGHT"> (packed, four)
      numbers = Concat <axis = -1> (lower, upper)
      one = Constant <value = float {{1.0}}> ()
      middle = Constant <value = uint8 {{8}}> ()
      centred = DequantizeLinear (numbers, one, middle)
      blocks_shape = Constant <value_ints = [{kept}{blocks}, {BLOCK}]> ()
      blocks = Reshape (centred, blocks_shape)
      scales = Gather <axis = 0> (scale, index)
      scaled = Mul (blocks, scales)
      rows_shape = Constant <value_ints = [{kept}{blocks * BLOCK}]> ()
    """
    if width % BLOCK == 0:
        return f"{unpacked} vectors = Reshape (scaled, rows_shape)"
    return f"""{unpacked}
      filled = Reshape (scaled, rows_shape)
      first = Constant <value_ints = [0]> ()
      last_axis = Constant <value_ints = [-1]> ()
      vectors = Slice (filled, first, width, last_axis)
    """


def _half_format(dtype: Literal["float16", "bfloat16"], codes: DTypeLike) -> TableFormat:
    return TableFormat(
        dtype=dtype,
        codes=np.dtype(codes),
        narrow=lambda rows, _: {CODES: _cast(rows, codes)},
        widen=lambda parts: parts[CODES].astype(np.float32),
        nodes=lambda *_: f"{GATHER} vectors = Cast <to = 1> (short)",
    )


FORMATS = (
    _half_format("float16", np.float16),
    _half_format("bfloat16", ml_dtypes.bfloat16),
    TableFormat(
        dtype="int8",
        scale="row",
        codes=np.dtype(np.int8),
        narrow=_int8_rows,
        widen=_int8_widen,
        nodes=lambda *_: (
            f"{GATHER} numbers = Cast <to = 1> (short) "
            "scales = Gather <axis = 0> (scale, index) vectors = Mul (numbers, scales)"
        ),
    ),
    TableFormat(
        dtype="int8",
        scale="tensor",
        codes=np.dtype(np.int8),
        whole=_int8_whole,
        narrow=lambda rows, whole: {CODES: _cast(_round(rows, whole[SCALE], 127), np.int8)},
        widen=_int8_widen,
        # Without a zero point, onnxruntime repeats the rounding after a reshape, for unsigned numbers.
        nodes=lambda *_: (
            f"{GATHER} zero = Constant <value = int8 {{0}}> () vectors = DequantizeLinear (short, scale, zero)"
        ),
    ),
    TableFormat(
        dtype="int4",
        scale="block",
        block=BLOCK,
        codes=np.dtype(np.uint8),
        whole=_int4_whole,
        narrow=_int4_rows,
        widen=_int4_widen,
        nodes=_int4_nodes,
    ),
)
"""The first format of a type is its default."""
