"""The stored types of tables: rounding values to them, and widening gathered rows in a graph.

Letters: B batch, L length, V rows and D width of a table, n any number of rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from preblock.export.arguments import check_scale
from preblock.export.errors import ExportError

BLOCK = 32
"""Columns of a row that share a scale, in int4."""

GATHER = "short = Gather <axis = 0> (codes, index)"
CODES, SCALE, WIDTH = ENDINGS = "", ".scale", ".width"
Parts = dict[str, Tensor]
"""The parts of a stored table, by the suffixes of their initializers."""


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """The stored form of a table.

    Args:
        dtype: name of the type.
        scale: unit with one scale; None for a type without scales.
        block: columns of a block; None unless each block has a scale.
        codes: torch type of a stored value.
        narrow: makes the parts stored for each row, from rows (n, D) and the parts stored once.
        widen: makes float32 (n, D) from all parts of n rows, bit for bit equal to `nodes`.
        nodes: the same in ONNX's textual form, for a table of width D. They compute float32 `vectors` (B, L, D) of
            int64 `index` (B, L) from the initializers `codes`, `scale` and `width`.
        whole: makes the parts stored once, from the rows of a table in float32, some (n, D) at a time; default none.

    """

    dtype: Literal["float16", "bfloat16", "int8", "int4"]
    scale: Literal["row", "tensor", "block"] | None = None
    block: int | None = None
    codes: torch.dtype
    narrow: Callable[[Tensor, Parts], Parts]
    widen: Callable[[Parts], Tensor]
    nodes: Callable[[int], str]
    whole: Callable[[Iterator[Tensor]], Parts] = lambda _: {}


def find_format(dtype: str, scale: str | None = None) -> TableFormat | None:
    """Return the format for `--dtype` and `--scale`; None for float32.

    Raises:
        ExportError: there is no such format.

    """
    check_scale(dtype, scale)
    if dtype == "float32":
        return None
    for format_ in FORMATS:
        if format_.dtype == dtype and scale in (None, format_.scale):
            return format_
    if scale is not None:
        raise ExportError(f"--scale: got {scale!r}, expected row, tensor")
    raise ExportError(f"--dtype: got {dtype!r}, expected float32, float16, bfloat16, int8, int4")


def _scale(largest: Tensor, levels: int) -> Tensor:
    """Return the scale to round `largest` to the highest of `levels`; 1 for a table of zeros."""
    scale = largest / levels
    return torch.where(scale == 0, 1.0, scale)


def _round(values: Tensor, scale: Tensor, levels: int) -> Tensor:
    return (values / scale).round().clamp(-levels, levels)


def _int8_rows(rows: Tensor, _: Parts) -> Parts:
    scale = _scale(rows.abs().amax(1, keepdim=True), 127)
    return {CODES: _round(rows, scale, 127).to(torch.int8), SCALE: scale}


def _int8_widen(parts: Parts) -> Tensor:
    return parts[CODES].to(torch.float32) * parts[SCALE]


def _int4_whole(table: Iterator[Tensor]) -> Parts:
    width = next(table).shape[1]
    return {WIDTH: torch.tensor([width])} if width % BLOCK else {}


def _int4_rows(rows: Tensor, _: Parts) -> Parts:
    # Zeros pad the last block. A byte holds a column of the first half in its lower four bits, and one of the second
    # half in its upper four, so that unpacking is one concatenation.
    blocks = F.pad(rows, (0, -rows.shape[1] % BLOCK)).reshape(len(rows), -1, BLOCK)
    scale = _scale(blocks.abs().amax(2, keepdim=True), 7)
    lower, upper = (_round(blocks, scale, 7) + 8).to(torch.uint8).flatten(1).chunk(2, dim=1)
    return {CODES: lower | upper << 4, SCALE: scale}


def _int4_widen(parts: Parts) -> Tensor:
    numbers = torch.cat((parts[CODES] & 15, parts[CODES] >> 4), dim=1).to(torch.float32) - 8
    rows = (numbers.reshape(len(numbers), numbers.shape[1] // BLOCK, BLOCK) * parts[SCALE]).flatten(1)
    return rows[:, : int(parts[WIDTH])] if WIDTH in parts else rows


def _int4_nodes(width: int) -> str:
    blocks = -(-width // BLOCK)
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
      blocks_shape = Constant <value_ints = [0, 0, {blocks}, {BLOCK}]> ()
      blocks = Reshape (centred, blocks_shape)
      scales = Gather <axis = 0> (scale, index)
      scaled = Mul (blocks, scales)
      rows_shape = Constant <value_ints = [0, 0, {blocks * BLOCK}]> ()
    """
    if width % BLOCK == 0:
        return f"{unpacked} vectors = Reshape (scaled, rows_shape)"
    return f"""{unpacked}
      filled = Reshape (scaled, rows_shape)
      first = Constant <value_ints = [0]> ()
      last_axis = Constant <value_ints = [-1]> ()
      vectors = Slice (filled, first, width, last_axis)
    """


def _half_format(dtype: Literal["float16", "bfloat16"], codes: torch.dtype) -> TableFormat:
    return TableFormat(
        dtype=dtype,
        codes=codes,
        narrow=lambda rows, _: {CODES: rows.to(codes)},
        widen=lambda parts: parts[CODES].to(torch.float32),
        nodes=lambda _: f"{GATHER} vectors = Cast <to = 1> (short)",
    )


FORMATS = (
    _half_format("float16", torch.float16),
    _half_format("bfloat16", torch.bfloat16),
    TableFormat(
        dtype="int8",
        scale="row",
        codes=torch.int8,
        narrow=_int8_rows,
        widen=_int8_widen,
        nodes=lambda _: (
            f"{GATHER} numbers = Cast <to = 1> (short) "
            "scales = Gather <axis = 0> (scale, index) vectors = Mul (numbers, scales)"
        ),
    ),
    TableFormat(
        dtype="int8",
        scale="tensor",
        codes=torch.int8,
        whole=lambda table: {SCALE: _scale(torch.stack([rows.abs().max() for rows in table]).max(), 127)},
        narrow=lambda rows, whole: {CODES: _round(rows, whole[SCALE], 127).to(torch.int8)},
        widen=_int8_widen,
        # Without a zero point, onnxruntime repeats the rounding after a reshape, for unsigned numbers.
        nodes=lambda _: (
            f"{GATHER} zero = Constant <value = int8 {{0}}> () vectors = DequantizeLinear (short, scale, zero)"
        ),
    ),
    TableFormat(
        dtype="int4",
        scale="block",
        block=BLOCK,
        codes=torch.uint8,
        whole=_int4_whole,
        narrow=_int4_rows,
        widen=_int4_widen,
        nodes=_int4_nodes,
    ),
)
"""The first format of a type is its default."""
