"""The header of a safetensors file. Source: the format's description in the README of huggingface/safetensors."""

import hashlib
import json
import os
from io import BufferedReader
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from preblock.service.core.errors import ArtifactError

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Types of tensors, by their names in a header."""


class StoredTensor(NamedTuple):
    """A tensor of a file: its type by its name in the header, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The SHA-256 of a header, length included, and the tensors by name."""

    sha256: str
    tensors: dict[str, StoredTensor]


def read_header(name: str, stream: BufferedReader) -> Header:
    """Return the header of the open file `stream`; `name` is the field of errors.

    Raises:
        ArtifactError: the file is no safetensors file, or its length is not that of its header and tensors.

    """
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ArtifactError(name, f"a header of {length} bytes in {size}", "a safetensors file")
    content = stream.read(length)
    try:
        document = json.loads(content)
        found = {key: _read_tensor(entry, 8 + length) for key, entry in document.items() if key != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(name, "a header without the places of tensors", "a safetensors file") from error
    places = sorted((tensor.begin, tensor.end) for tensor in found.values())
    bounds = [(8 + length, 8 + length), *places, (size, size)]
    if any(end != begin for (_, end), (begin, _) in pairwise(bounds)):
        raise ArtifactError(name, f"{size} bytes", f"{bounds[-2][1]} bytes of header and consecutive tensors")
    return Header(hashlib.sha256(prefix + content).hexdigest(), found)


def _read_tensor(entry: dict[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or end < begin:
        raise ValueError("places and sizes are whole numbers")
    return StoredTensor(str(entry["dtype"]), shape, start + begin, start + end)
