"""Tensors by name in the safetensors format.

A file holds the length of a header in 8 bytes, the header in JSON, and the values, all little-endian. This module reads
and writes the format, because the library copies every tensor and needs torch for bfloat16.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from preblock.service.artifacts.safetensors_header import TYPES
from preblock.service.codecs.chunks import Part, as_bytes
from preblock.service.codecs.fields import unique_names
from preblock.service.codecs.output_uses import use_of
from preblock.service.core.errors import Malformed
from preblock.service.core.types import EmbedResult, Result, Tensor

TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
METADATA = "__metadata__"
ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
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
        message = f"body: not a valid safetensors file ({error}), expected integer tensors"
        raise Malformed("body", "an invalid safetensors file", expected, message=message) from error


def _read(body: bytes) -> dict[str, NDArray[Any]]:
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 + length or length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, the body {len(body)}; expected at most {MAX_HEADER_BYTES}")
    if body[8:9] != b"{":
        raise ValueError("a header that is no JSON object")
    header = json.loads(body[8 : 8 + length].decode(), object_pairs_hook=unique_names)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} that is no text by name")
    data, tensors, last = memoryview(body)[8 + length :], {}, 0
    for begin, end, name, dtype, shape in sorted(_entry(name, entry) for name, entry in header.items()):
        if begin != last or end > len(data):
            raise ValueError(f"data_offsets [{begin}, {end}] after {last}, of {len(data)} bytes")
        tensors[name] = np.frombuffer(data[begin:end], TYPES[dtype]).reshape(shape)
        last = end
    if last != len(data):
        raise ValueError(f"{len(data)} bytes of data, where the header describes {last}")
    return tensors


def _entry(name: str, entry: Any) -> tuple[int, int, str, str, list[int]]:
    """Return begin, end, name, dtype and shape of a tensor; raise ValueError if they disagree."""
    name.encode()  # an unpaired surrogate could not be quoted in a message
    if not isinstance(entry, dict) or entry.keys() != ENTRY_FIELDS:
        raise ValueError("a tensor with other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ValueError(f"a dtype that is none of {', '.join(TYPES)}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError("a shape or data_offsets that are no sizes")
    # Python integers: the product of declared sizes cannot overflow.
    declared = TYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != declared:
        raise ValueError(f"{offsets[1] - offsets[0]} bytes for {dtype} of {declared} bytes")
    return offsets[0], offsets[1], name, dtype, shape


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


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
