"""Simple steps of a decode stream: frames with rows of one length, and no optional part except offsets.

The fast path answers them. `decode_frames` has the layout of frames.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from preblock.service.codecs.decode_frames import (
    DTYPE_CODES,
    HEADER,
    KINDS,
    MAGIC,
    NO_WIDTH,
    OFFSETS_FLAG,
    STEP,
    VECTORS,
    describe_outputs,
    write_header,
)
from preblock.service.core.decode_ops import RunningRows
from preblock.service.core.types import Int64

INT64 = np.dtype("<i8")
MAX_SIMPLE_STEP_BYTES = 2**16
"""The fast path gains nothing for longer frames."""
OutputForms = tuple[tuple[int, str], ...]
"""Width and type of each output."""


class SimpleStepShape(NamedTuple):
    """The common part of simple steps with the same header and size: R rows of L ids each.

    Args:
        version: of the frame.
        rows: R.
        length: L.
        offset_size: number of bytes of the client's offsets, or 0.
        lengths: last bytes of the frame, the lengths of the rows.
        advance: int64 (1,), L, for the growth of the offsets.

    """

    version: Literal[1, 2]
    rows: int
    length: int
    offset_size: int
    lengths: bytes
    advance: Int64


class SimpleStep(NamedTuple):
    """A step with rows of one length, and no optional part except offsets.

    Args:
        shape: the part in common with other steps.
        number: the client's number of the step, or 0.
        ids: int64 (R, L).
        offset: the client's offsets as int64 bytes (R,), or empty.

    """

    shape: SimpleStepShape
    number: int
    ids: Int64
    offset: bytes


def read_simple_step(frame: bytes) -> SimpleStep | None:
    """Read a simple step; return None for any other frame, which `read_frame` then reads or rejects."""
    # Clients repeat the same header with another number.
    shape = _simple_step_shape(frame[:8], frame[12 : HEADER.size], len(frame))
    if shape is None or not frame.endswith(shape.lengths):
        return None
    ids: Int64 = np.ndarray((shape.rows, shape.length), INT64, frame, HEADER.size)
    until = len(frame) - len(shape.lengths)
    return SimpleStep(shape, int.from_bytes(frame[8:12], "little"), ids, frame[until - shape.offset_size : until])


@lru_cache  # entries are small: shorter than their frames
def _simple_step_shape(first: bytes, last: bytes, size: int) -> SimpleStepShape | None:
    """Return the common part of simple steps with a header of `first`, a number and `last`; None for other frames."""
    header = first + bytes(4) + last
    if len(header) < HEADER.size or size > MAX_SIMPLE_STEP_BYTES:
        return None
    _, version, _, flags, _, rows, tokens, _, _ = HEADER.unpack(header)
    offset_size = 8 * rows if flags == OFFSETS_FLAG and version == 2 else 0
    plain = HEADER.pack(MAGIC, version, STEP, OFFSETS_FLAG if offset_size else 0, 0, rows, tokens, 0, NO_WIDTH)
    if header != plain or version not in KINDS or not rows or not tokens or tokens % rows:
        return None
    if size != HEADER.size + 8 * tokens + offset_size + 4 * rows:
        return None
    length = tokens // rows
    return SimpleStepShape(version, rows, length, offset_size, length.to_bytes(4, "little") * rows, np.array([length]))


def write_simple_step_header(step: SimpleStep, after: RunningRows, forms: OutputForms) -> bytes:
    """Return the bytes before the vectors in the answer to a step, after which the rows are in the state `after`."""
    shape, history = step.shape, 0 if after.context is None else after.context.shape[1]
    first, last, end = _simple_step_header(shape.version, shape.rows, shape.length, forms, history)
    context = b"" if after.context is None else after.context.data
    return b"".join((first, step.number.to_bytes(4, "little"), last, after.offset.data, context, shape.lengths, end))


@lru_cache
def _simple_step_header(
    version: int, rows: int, length: int, forms: OutputForms, history: int
) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before and after the number in the header of an answer, and the bytes after its lengths."""
    widths, codes = [width for width, _ in forms], [DTYPE_CODES[dtype] for _, dtype in forms]
    dtype, last, end = describe_outputs(version, widths, codes, history)
    header = write_header(version, VECTORS, 0, rows, rows * length, dtype, last)
    return header[:8], header[12:], end
