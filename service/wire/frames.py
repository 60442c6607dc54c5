"""Binary frames of a decode stream, version 1. Little-endian, no padding.

Every frame begins with 24 bytes:

    bytes   field
    0-3     magic      "INCP"
    4       version    1
    5       kind       1 step (client), 2 vectors (server), 3 error (server)
    6-7     flags      0; every bit is reserved
    8-11    step       a number that the client chooses; the answer repeats it
    12-15   rows       R, number of rows; 1
    16-19   tokens     T, number of tokens of all rows
    20      dtype      of vectors: 1 float32, 2 float16, 3 bfloat16; 0 in other frames
    21-23   width      D of vectors; 0 in other frames

Then come, in a step: ids int64 (T), lengths uint32 (R). In vectors: next offsets int64 (R), lengths uint32 (R),
vectors (T, D) in `dtype`. In an error: the problem as UTF-8 JSON. A reader refuses what it does not know, so that
later kinds and flags do not change the meaning of these.
"""

import struct
from dataclasses import dataclass

import numpy as np

from incipit.service.errors import Invalid, Malformed
from incipit.service.manifest import EMBEDDINGS
from incipit.service.messages import Rows, TokenAnswer
from incipit.service.wire.content import raw_bytes

MAGIC, VERSION = b"INCP", 1
HEADER = struct.Struct("<4sBBHIIIB3s")
STEP, VECTORS, ERROR = 1, 2, 3
DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3}


@dataclass(frozen=True)
class Step:
    """The ids that a stream is fed next, and the client's number for them."""

    number: int
    input_ids: Rows


def read_step(frame: bytes) -> Step:
    """Read a step.

    Raises:
        Malformed: no frame of this version, or another size than it declares.
        Invalid: a kind or flag that is not known.

    """
    if len(frame) < HEADER.size:
        raise Malformed("frame", f"{len(frame)} bytes", f"a header of {HEADER.size} bytes and what it declares")
    magic, version, kind, flags, number, rows, tokens, dtype, width = HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise Malformed("frame", f"magic {magic!r}, version {version}", f"magic {MAGIC!r}, version {VERSION}")
    if kind != STEP:
        raise Invalid("kind", kind, f"{STEP}, a step")
    if flags or dtype or any(width):
        raise Invalid("flags, dtype and width", f"{flags}, {dtype} and {width.hex()}", "0 in a step")
    declared = HEADER.size + 8 * tokens + 4 * rows
    if len(frame) != declared:
        raise Malformed("frame", f"{len(frame)} bytes", f"{declared} bytes for {tokens} tokens in {rows} rows")
    lengths = np.frombuffer(frame, "<u4", rows, HEADER.size + 8 * tokens).astype(np.int64)
    if int(lengths.sum()) != tokens:
        raise Malformed("lengths", f"{int(lengths.sum())} tokens in all", f"{tokens}, as the header says")
    # A copy, because the ids need not be aligned in the frame.
    return Step(number, Rows(np.frombuffer(frame, "<i8", tokens, HEADER.size).astype(np.int64), lengths))


def step_number(frame: bytes) -> int:
    """Return the client's number of a frame that could not be read, or 0."""
    return int(HEADER.unpack_from(frame)[4]) if len(frame) >= HEADER.size else 0


def write_vectors(answer: TokenAnswer, number: int) -> bytes:
    """Write the answer to a step."""
    vectors = answer.tensors[EMBEDDINGS]
    tokens, width = int(answer.lengths.sum()), vectors.shape[-1]
    return b"".join(
        (
            HEADER.pack(
                MAGIC,
                VERSION,
                VECTORS,
                0,
                number,
                len(answer.lengths),
                tokens,
                DTYPE_CODES[answer.dtype],
                width.to_bytes(3, "little"),
            ),
            answer.next_offset.astype("<i8").tobytes(),
            answer.lengths.astype("<u4").tobytes(),
            raw_bytes(vectors),
        )
    )


def write_error(problem: bytes, number: int) -> bytes:
    """Write an error; `problem` is UTF-8 JSON."""
    return HEADER.pack(MAGIC, VERSION, ERROR, 0, number, 0, 0, 0, bytes(3)) + problem
