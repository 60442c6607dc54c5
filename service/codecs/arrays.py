"""Bodies with one array: raw little-endian bytes, and .npy."""

import ast
import io
import math
import re
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Malformed
from preblock.service.core.types import Int64

Header = tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]
"""Header of a .npy file: shape, order, and dtype."""
MAX_HEADER_BYTES = 10_000
"""Limit of numpy. The Python parser takes about a hundred times as much memory."""
MAX_CACHED_HEADER_BYTES = 256
"""Headers of integer arrays have 128 bytes."""
SHAPE = re.compile("[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})?")


def read_raw(body: bytes, shape: str | None) -> Int64:
    """Read little-endian int64 values: one row, or an array of `shape`, such as "2,3".

    Raises:
        Malformed: another number of bytes, or an illegal shape.

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
        Malformed: another format, or another number of bytes than the header declares.

    """
    try:
        end = 10 + int.from_bytes(body[8:10], "little")  # version 1; in version 2 the length has four bytes
        if body[6:8] == b"\x01\x00" and end <= MAX_CACHED_HEADER_BYTES:
            shape, order, dtype = _cached_header(body[:end])
        else:
            end, (shape, order, dtype) = _read_header(body)
        # Python integers: the product of declared sizes cannot overflow.
        if (declared := dtype.itemsize * math.prod(shape)) != len(body) - end:
            raise ValueError(f"it has {len(body) - end} bytes of data, and its header declares {declared}")
        return np.frombuffer(body, dtype, offset=end).reshape(shape, order=order)
    except (ValueError, OverflowError) as error:
        message = f"body: not a valid .npy file ({error}), expected an integer array"
        raise Malformed("body", "an invalid .npy file", "an integer array in .npy format", message=message) from error


def _read_header(body: bytes) -> tuple[int, Header]:
    """Return the end and the content of the header of a .npy file.

    The reader of numpy also accepts headers of Python 2, with a warning. A client must not cause warnings.
    """
    sizes = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}
    if body[:8] not in sizes:
        raise ValueError("it does not begin with \\x93NUMPY and version 1 or 2")
    begin = 8 + sizes[body[:8]]
    end = begin + int.from_bytes(body[8:begin], "little")
    if end - begin > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {end - begin} bytes, more than {MAX_HEADER_BYTES}")
    if len(body) < end:
        raise ValueError("its header is incomplete")
    try:
        header = ast.literal_eval(body[begin:end].decode("latin-1"))
        shape, dtype = header["shape"], np.lib.format.descr_to_dtype(header["descr"])
    except Exception as error:  # the Python parser raises many kinds of errors
        raise ValueError("its header is not readable") from error
    if header.keys() != {"descr", "fortran_order", "shape"} or type(header["fortran_order"]) is not bool:
        raise ValueError("its header has other fields than descr, fortran_order and shape")
    if dtype.hasobject or type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("it holds objects, or its shape is not a tuple of sizes")
    return end, (shape, "F" if header["fortran_order"] else "C", dtype)


@lru_cache
def _cached_header(header: bytes) -> Header:
    """Return the content of a header. Parsing it takes longer than the rest of a small request."""
    return _read_header(header)[1]


@lru_cache
def npy_header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """Return the bytes before the values in a .npy file; the format has no bfloat16."""
    stream = io.BytesIO()
    header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()
