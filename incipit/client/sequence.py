"""A decode stream without its connection: steps become frames, and frames vectors, as `docs/decode.md` describes."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from incipit.client.calls import Row, from_torch
from incipit.client.errors import StreamClosed, invalid, of_problem
from incipit.client.results import Vectors, array_of

MAGIC, VERSION = b"INCP", 1
HEADER = struct.Struct("<4sBBHIIIB3s")
STEP, VECTORS, ERROR = 1, 2, 3
ALLOWED = "64-bit integers of shape (length,) or (1, length)"
DTYPES = {1: "float32", 2: "float16", 3: "bfloat16"}


class Sequence:
    """The running offset of one sequence; each step is asked, then answered.

    Args:
        offset: real tokens fed before.

    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._number = 0
        self._answered = True

    def ask(self, ids: Row) -> bytes:
        """Return the frame of the next step.

        Raises:
            Invalid: `ids` are no integers.
            StreamClosed: the answer to the step before was not read, so that nobody knows the offset.

        """
        array = _rows(ids)
        if not self._answered:
            raise StreamClosed("the answer to the step before was not waited for", self.offset)
        self._answered = False
        self._number = (self._number + 1) % 2**32
        rows, length = array.shape
        header = HEADER.pack(MAGIC, VERSION, STEP, 0, self._number, rows, array.size, 0, bytes(3))
        return header + array.tobytes() + np.full(rows, length, "<u4").tobytes()

    def answer(self, frame: bytes) -> Vectors:
        """Return the vectors (1, L, D) of the step that was asked, and advance the offset.

        Raises:
            ServiceError: the step was refused; it changed nothing.
            StreamClosed: the frame is no answer to that step.

        """
        if len(frame) < HEADER.size:
            raise StreamClosed(f"a frame of {len(frame)} bytes came", self.offset)
        magic, version, kind, flags, number, rows, tokens, dtype, width = HEADER.unpack_from(frame)
        if (magic, version, flags, number) != (MAGIC, VERSION, 0, self._number):
            raise StreamClosed("a frame came that answers another question", self.offset)
        if kind == ERROR:
            self._answered = True
            problem = frame[HEADER.size :]
            raise of_problem(0, problem)
        if kind != VECTORS or rows != 1 or dtype not in DTYPES:
            raise StreamClosed(f"a frame of kind {kind}, {rows} rows and type {dtype} came", self.offset)
        try:
            (offset,) = struct.unpack_from("<q", frame, HEADER.size)
            # A copy, so that the vectors may be changed.
            data = bytearray(memoryview(frame)[HEADER.size + 12 * rows :])
            vectors = array_of(data, DTYPES[dtype], [rows, tokens, int.from_bytes(width, "little")])
        except (struct.error, ValueError) as error:
            raise StreamClosed(f"a frame of {len(frame)} bytes came", self.offset) from error
        self.offset, self._answered = offset, True
        return vectors


def _rows(ids: Row) -> NDArray[Any]:
    """Return rows of ids as little-endian int64 (R, L)."""
    try:
        array = np.asarray(from_torch(ids))
    except ValueError as error:
        raise invalid("input_ids", error, ALLOWED) from error
    exact = array.astype("<i8") if array.dtype.kind in "iu" or not array.size else None
    if exact is None or array.ndim not in (1, 2) or (exact != array).any():
        raise invalid("input_ids", f"{array.dtype} of shape {array.shape}", ALLOWED)
    return np.atleast_2d(exact)
