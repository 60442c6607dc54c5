"""Tensors by name in the safetensors format.

A file holds the length of a header in 8 bytes, the header in JSON, and the values, all little-endian. This module reads
and writes the format, because the library copies every tensor and needs torch for bfloat16.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from preblock.service.artifacts.safetensors_header import METADATA, TYPES, cover, parse_header, reason_of
from preblock.service.codecs.chunks import Part, as_bytes
from preblock.service.codecs.output_uses import use_of
from preblock.service.core.errors import Malformed, shorten
from preblock.service.core.types import EmbedResult, Result, Tensor

TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
MAX_HEADER_BYTES = 2**16
"""Far more than the header of any valid request; it bounds the time of parsing."""


def read_safetensors(body: bytes) -> dict[str, NDArray[Any]]:
    """Return the tensors of a file by name, without a copy.

    Raises:
        Malformed: another format, or a header that describes a byte twice or not at all.

    """
    try:
        return _read(body)
    except (ValueError, OverflowError, RecursionError) as error:
        expected = "integer tensors in safetensors format"
        message = f"body: not a valid safetensors file ({reason_of(error)}), expected integer tensors"
        raise Malformed("body", "an invalid safetensors file", expected, message=message) from error


def _read(body: bytes) -> dict[str, NDArray[Any]]:
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 + length or length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, the body {len(body)}; expected at most {MAX_HEADER_BYTES}")
    tensors = parse_header(body[8 : 8 + length])
    if not cover(tensors, 8 + length, len(body)):
        raise ValueError(f"data_offsets that do not describe each of {len(body) - 8 - length} bytes once")
    for dtype, shape, begin, end in tensors.values():
        # Python integers: the product of declared sizes cannot overflow.
        if dtype not in TYPES or end - begin != TYPES[dtype].itemsize * math.prod(shape):
            raise ValueError(f"{end - begin} bytes of {shorten(dtype)} {shorten(shape)}; dtypes: {', '.join(TYPES)}")
    view = memoryview(body)
    return {
        name: np.frombuffer(view[tensor.begin : tensor.end], TYPES[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def write_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Part]:
    """Write C-contiguous tensors without a copy. The same tensors give the same bytes."""
    # Wider dtypes come first, to align every tensor.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (begin, end)}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(as_bytes(tensor) for _, tensor in ordered)]


def write_result(answer: Result) -> list[Part]:
    """Write the outputs of a result; for tokens also the lengths, next offsets and next contexts of the rows."""
    tensors: dict[str, Tensor] = dict(answer.tensors)
    if isinstance(answer, EmbedResult):
        tensors |= answer.row_values
        if answer.input_ids is not None and answer.spans is not None:
            tensors |= {"input_ids": answer.input_ids.values, "spans": answer.spans}
    metadata = {"model": answer.model, "version": str(answer.version)}
    metadata |= {f"use_as.{name}": use_of(name, answer.lookup_use) for name in answer.tensors}
    return write_safetensors(tensors, metadata)
