"""One array as a body: raw bytes, little-endian, and .npy."""

import io
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from incipit.service.errors import Malformed
from incipit.service.messages import Int64

SHAPE = re.compile("[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})?")


def read_raw(body: bytes, shape: str | None) -> Int64:
    """Read little-endian int64: one row, or in the sizes of `shape`, such as "2,3".

    Raises:
        Malformed: another number of bytes, or a shape that is none.

    """
    if len(body) % 8:
        raise Malformed("body", f"{len(body)} bytes", "int64 values of 8 bytes each")
    values: Int64 = np.frombuffer(body, "<i8")
    if shape is None:
        return values
    if not SHAPE.fullmatch(shape):
        raise Malformed("shape", shape, "one or two sizes with a comma, such as 2,3")
    sizes = [int(size) for size in shape.split(",")]
    if math.prod(sizes) != len(values):
        raise Malformed("body", f"{len(values)} values", f"{math.prod(sizes)}, as the shape {shape} declares")
    return values.reshape(sizes)


def read_npy(body: bytes) -> NDArray[Any]:
    """Read an array in .npy format, without pickles (numpy.lib.format, versions 1 and 2).

    Raises:
        Malformed: anything else, or another number of bytes than the header declares.

    """
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read_header(stream)
        data = memoryview(body)[stream.tell() :]
        if dtype.hasobject or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("objects, or a shape that is none")
        # Python's integers: no product of declared sizes can wrap.
        declared = dtype.itemsize
        for size in shape:
            declared *= size
        if declared != len(data):
            raise ValueError(f"{len(data)} bytes of data, where the header declares {declared}")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # the header is parsed as Python, which fails in every way that Python's parser knows
        raise Malformed("body", f"no .npy: {error}", "an integer array in .npy format") from error


def npy_header(tensor: NDArray[np.generic]) -> bytes:
    """Return what stands before the values of an array in a .npy file; the format has no bfloat16."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(tensor))
    return stream.getvalue()
